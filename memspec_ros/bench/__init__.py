# SPDX-License-Identifier: Apache-2.0
"""Measurements over the same controller that the node runs."""
