"""The one error type of AnyShape: every message says what failed, where, why, and what to do."""
from __future__ import annotations


def printable(text: str) -> str:
    """A text that a terminal shows as it is: what could steer it, such as escape sequences from a file of a stranger,
    is written as in Python's literals."""
    return text if text.isprintable() else "".join(
        one if one.isprintable() or one in "\n\t" else one.encode("unicode_escape").decode() for one in text)


class AnyShapeError(RuntimeError):
    """An error a person can act on.

    Args:
        what: what failed, one sentence.
        where: the user's file and line, or the node with a caret; empty when there is none.
        why: the fact that is missing or false.
        do: what the person can do about it.
    """

    def __init__(self, what: str, *, where: str = "", why: str = "", do: str = "") -> None:
        self.what = what
        self.where = where
        self.why = why
        self.do = do
        lines = [what]
        if where:
            lines.append(f"  where: {where}")
        if why:
            lines.append(f"  why:   {why}")
        if do:
            lines.append(f"  do:    {do}")
        super().__init__(printable("\n".join(lines)))


class InputError(AnyShapeError):
    """The caller's arguments do not fit the compiled program (dtype, rank, device, number, size)."""


class InputTypeError(InputError, TypeError):
    """The same, where eager PyTorch raises a TypeError."""


class InputValueError(InputError, ValueError):
    """The same, where eager PyTorch raises a ValueError."""


class InputIndexError(InputError, IndexError):
    """The same, where eager PyTorch raises an IndexError."""


class LimitError(AnyShapeError, MemoryError):
    """A call cannot be done within the limit in bytes that was set; nothing of it has run.

    Args:
        least: the smallest limit that works; 0: not known. The others: as in AnyShapeError.
    """

    def __init__(self, what: str, *, where: str = "", why: str = "", do: str = "", least: int = 0) -> None:
        super().__init__(what, where=where, why=why, do=do)
        self.least = least


class StoreError(AnyShapeError):
    """A value could not be moved out of memory, or back."""


class IndexRangeError(AnyShapeError, IndexError):
    """An index into a tensor is out of range, found while a program ran."""


class DivisionError(AnyShapeError, ZeroDivisionError):
    """A whole number is divided by 0, found while a program ran."""


class DeviceError(AnyShapeError):
    """A device cannot be used: it has no driver, or an old one, or not enough memory; or its driver refuses a call, or
    a kernel does not compile for it.

    Attributes:
        code: the driver's own number of the error; 0: it is none of the driver's.
        reached: of a call that was refused while it ran, the last step of its plan that has begun; -1: none has; None:
            not known.
    """

    code: int = 0
    reached: int | None = None

    @classmethod
    def no_memory(cls, why: str, where: str = "") -> DeviceError:
        """The device has no memory left, whoever has taken it."""
        return cls("the device has not enough memory", where=where, why=why,
                   do="run with smaller sizes, set memory_limit, or end what else uses the card")

    def within(self, where: str) -> DeviceError:
        """The same, of a user's line."""
        inside = f"{self.where}: " if self.where else ""
        return DeviceError(self.what, where=where, why=f"{inside}{self.why}", do=self.do)


class RankError(AnyShapeError):
    """Ranks do not run the same program, or cannot run it on what they were given, or one has ended; raised on all of
    them."""


class DataError(AnyShapeError, AssertionError, ValueError):
    """What the program asserts of its data does not hold: of every kind that eager PyTorch raises at such places."""


class VerifyError(AnyShapeError):
    """A graph, loop program or plan breaks one of its rules: a bug of the compiler."""


class ParseError(AnyShapeError):
    """A text form could not be read back."""


class ArtifactError(AnyShapeError):
    """A deployed file is not as `anyshape.save` writes it, or needs what this machine or process has not."""


class ConfigError(AnyShapeError):
    """A setting has an unknown name or an impossible value."""


class OutputError(AnyShapeError):
    """A file could not be written; what was there before is as it was."""


class EditError(ConfigError):
    """A stage that a person has edited cannot be put in place of the computed one."""


class Unsupported(AnyShapeError):
    """A construct the native road does not carry; the caller falls back and explains it."""
