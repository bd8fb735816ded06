# SPDX-License-Identifier: Apache-2.0
"""What a bundle needs in memory, and whether that is there."""
