"""The typed errors of the command line; each is one line that ends with the next step.
Owns what fetching a model and comparing models can end in; must not know how an error is shown."""

from martlet.quant.errors import MartletError


class PullError(MartletError):
    """The model could not be fetched; the cache is as it was before."""


class UnknownModel(PullError):
    """No file, no catalogue name and no hf: address."""


class ChecksumMismatch(PullError):
    """What arrived is not the file the catalogue names."""


class ComparisonError(MartletError):
    """The figures asked for would mean nothing."""


class TextTooShort(ComparisonError):
    """The text has too few tokens for the protocol."""


class VocabularyMismatch(ComparisonError):
    """Two files do not predict the same tokens."""


class TokensMismatch(ComparisonError):
    """Two files cut the text into different tokens."""


class MissingExtra(MartletError):
    """An optional package is not installed."""
