# SPDX-License-Identifier: Apache-2.0
"""
What MemSpec's figures and tables say, as far as its text gives numbers.

A LLaMA-2 7B in INT4 with five drafts of 400M on a Jetson Orin Nano (capacity: on
an AGX Orin), 100 prompts each of five domains, N = 4, K = 2, 128 tokens.
"""

from __future__ import annotations

from ...training.ranker_quality import PAPER as PREDICTOR  # noqa: F401 (Table 2, combined inputs)
from ..profile import PAPER_LOAD_RATIO as LOAD_RATIO  # noqa: F401 (Fig. 2)

# Figs. 1 and 3: accepted tokens over general_static's; oracle_dynamic is 25.7 % above
# oracle_static.
ACCEPTANCE = {'general_static': 1.0, 'ucb_sync': 1.345, 'oracle_static': 1.403,
              'oracle_dynamic': 1.403 * 1.257}
# Figs. 6 and 8: +22.5 %, another 24.9 %, +21.6 %, +58.8 % and that over ucb_async +40.7 %. What
# section 4.5 and Fig. 12 say of K = 2 is less for memspec, and fits 95 to 97 % of oracle_dynamic.
THROUGHPUT = {'general_static': 1.0, 'oracle_static': 1.225, 'prediction_only': 1.216,
              'ucb_async': 1.588 / 1.407, 'memspec': 1.588, 'oracle_dynamic': 1.225 * 1.249}
OF_ORACLE_DYNAMIC = (0.95, 0.97)
# Figs. 7 and 9; Fig. 4 has 46.4 % for ucb_async on LLaMA-2 alone.
FALLBACK = {'ucb_async': 0.494, 'prediction_only': 0.213, 'memspec': 0.055}
PREDICTION = {'memspec': 0.039}
# "Below" these.
LIMITS = ('memspec',)
# Figs. 10 and 11 have no numbers in the text.
INTERVAL_SHAPE = 'rises from N = 2 to 4, the same at 8, falls at 16'
LENGTH_SHAPE = 'what memspec gains grows with the length'
# Fig. 12, by K.
CAPACITY = {'ucb_async': {2: 1.13, 4: 1.29}, 'memspec': {2: 1.47, 4: 1.51}}
# Section 4.6: end-to-end latency of memspec over that of others.
LATENCY = {'general_static': 1 - 0.323, 'ucb_async': 1 - 0.249}
