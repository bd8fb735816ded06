# SPDX-License-Identifier: Apache-2.0
"""Verified decoding: draft, verify, commit, emit. Knows nothing of policies or ROS."""
