# SPDX-License-Identifier: Apache-2.0
"""The MemSpec controller: ranking, residency and scheduling of drafts. Knows nothing of ROS."""
