# SPDX-License-Identifier: Apache-2.0
"""The lowest floor: bundle manifest, target model, and one file per draft kind."""
