# SPDX-License-Identifier: Apache-2.0
"""Errors a user can act on: each message names the thing and the remedy."""


class MemSpecError(Exception):
    """Base of every error this package raises on purpose."""


class BundleError(MemSpecError):
    """The bundle's manifest or one of its files is wrong."""


class UnsupportedModelError(MemSpecError):
    """A model that this code cannot run rightly, and says so instead."""


class VocabularyMismatchError(MemSpecError):
    """A draft does not speak the target's tokens."""


class InvalidRequestError(MemSpecError):
    """A request that cannot be carried out as asked."""


class ContextOverflowError(InvalidRequestError):
    """Prompt and answer do not fit the context."""


class InsufficientMemoryError(MemSpecError):
    """Loading would take more memory than is free or allowed."""
