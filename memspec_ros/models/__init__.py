# SPDX-License-Identifier: Apache-2.0
"""The lowest floor: bundle manifest, target model, and one file per draft kind."""

import os

# Read by OpenMP when torch is imported, hence here, where every path to torch begins. Its threads
# spin while they wait; beside a busy core that stalls them all, and a robot's cores are busy. On a
# machine with idle cores GOMP_SPINCOUNT=10000 decodes about 1.3 times as fast
# (docs/benchmarks.md).
if not {'OMP_WAIT_POLICY', 'GOMP_SPINCOUNT'} & set(os.environ):
    os.environ['OMP_WAIT_POLICY'] = 'PASSIVE'
