# SPDX-License-Identifier: Apache-2.0
"""Making drafts: the target's own outputs as training data, and distillation from them."""
