"""The root of martlet's typed errors, and those that a file can cause.

Owns: the classes every caller may catch. Must not know: who raises them or how they are shown
(the command line prints the message, the server turns it into a status).

A message is one line. It names the place (field, key, tensor), carries the needed and the actual
number, and ends with the next step where there is one.
"""


class MartletError(Exception):
    """Base of every error martlet raises on purpose."""


class FileFormatError(MartletError):
    """The file is damaged, cut short, or breaks the rules of its format."""


class UnsupportedError(MartletError):
    """The file is valid, but martlet does not implement what it asks for."""


class NoSpace(MartletError):
    """The disk is too full for the file that was to be written."""


class NotAFile(MartletError):
    """The place where a file was to be written is a folder, a device or a pipe."""


class FileChanged(MartletError):
    """A file was written to or cut short while it was read."""


class InUse(MartletError):
    """Another process is writing the file."""
