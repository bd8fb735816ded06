# SPDX-License-Identifier: Apache-2.0
"""The benchmark's suites: one figure or table of MemSpec each, or what it leaves out."""

from . import (
    acceptance,
    breakdown,
    capacity,
    interval,
    latency,
    length,
    multiturn,
    policies,
    predictor,
    switch_cost,
)

# In the order of a report: what the others need first is run once.
SUITES = {module.SUITE.name: module.SUITE for module in (
    switch_cost, policies, acceptance, breakdown, interval, length, capacity, predictor, latency,
    multiturn)}
