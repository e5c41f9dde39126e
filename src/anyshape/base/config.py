"""Every knob of AnyShape: one frozen dataclass; `ANYSHAPE_<FIELD>` in the environment sets a default."""
from __future__ import annotations

import dataclasses
import functools
import numbers
import os
import warnings
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypeVar

from anyshape.base.errors import ConfigError
from anyshape.base.units import bytes_of

LARGEST = (1 << 63) - 1  # of a whole number: what native code takes
KINDS = {bool: "True or False", int: "a whole number", str: "a text"}
if TYPE_CHECKING:
    from _typeshed import DataclassInstance

C = TypeVar("C", bound="DataclassInstance")
OF_TORCH = {"mode": "leave it out: it is torch.compile's, and there is one mode",
            "backend": 'leave it out, or call torch.compile(..., backend="anyshape")',
            "options": "pass the settings themselves, such as strict=True"}


def _knob(default: Any, text: str, least: int = 0, most: int = LARGEST, bytes_: bool = False,
          choices: tuple[str, ...] = ()) -> Any:
    return field(default=default, metadata={"help": text, "least": least, "most": most, "bytes": bytes_,
                                            "choices": choices})


def _names_checked(kind: type[C]) -> type[C]:
    """The class, which says of a name that it does not know which one is near."""
    made = kind.__init__

    @functools.wraps(made)
    def init(self: C, **settings: Any) -> None:
        known = {knob.name for knob in fields(self)}
        for name in settings:
            if name not in known:
                raise ConfigError(f"unknown setting {name!r}", why=f"the settings are {', '.join(sorted(known))}",
                                  do=OF_TORCH.get(name) or f"correct the name{_nearest(name, known)}")
        made(self, **settings)

    kind.__init__ = init  # type: ignore[method-assign, assignment]
    return kind


@_names_checked
@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Settings of one compilation, by name: those left out have their defaults (`Config.make`: or the environment's).

    No setting enters the key of the object cache: that is the text of the code, whatever settings led to it.

    Raises:
        ConfigError: an unknown name, or a value of another type or out of range.
    """

    strict: bool = _knob(False, "nothing runs as PyTorch: raise where the compiler fails, at graph breaks, and for "
                                "whatever else would make a call run as PyTorch; defer and background have no effect")
    check: int = _knob(0, "0: nothing, 1: verify the graph after every pass and judge the plan, 2: also compare every "
                          "run with the reference interpreter", most=2)
    show: str = _knob("", "print a stage: capture, any pass name, kernels, llvm, plan, or all")
    dump: str = _knob("", "folder that receives every stage as a text file")
    edit: str = _knob("", "folder that dump= has written: graphs and kernels whose text was changed there stand in "
                          "place of the computed ones")
    cache: bool = _knob(True, "keep compiled code on disk")
    cache_dir: str = _knob("", "folder of the disk cache; empty: the user's cache folder")
    cache_limit: int = _knob(1 << 30, "bytes that the disk cache may hold, as a number or such as \"2GiB\"; beyond "
                                      "them the entries that were used longest ago go", bytes_=True)
    warm_start: bool = _knob(False, "take captured programs, with their guards, from the disk cache, and keep them "
                                    "there for the next process; off: each process traces anew")
    threads: int = _knob(0, "threads of a kernel; 0: as many as torch uses", most=1 << 16)
    fuse: bool = _knob(True, "fuse pointwise, reduction and view work into kernels")
    max_nodes: int = _knob(128, "largest number of equations in one kernel", least=1)
    packed_bytes: int = _knob(32 << 20, "weights of convolutions stay reordered from call to call while they and what "
                                        "the call holds fit into this many bytes, or into what some call has held")
    memory_limit: int = _knob(0, "bytes that a program may take beyond what is alive when it is called, forward and "
                                 "backward together, as a number or such as \"12GiB\"; 0: no limit", bytes_=True)
    memory_limit_total: int = _knob(0, "the same with what is alive: bytes of memory that the whole process may have "
                                       "while a program runs; 0: no limit", bytes_=True)
    memory_store: str = _knob("", "folder on a disk to which a call under a limit in bytes may move values out between "
                                  "forward and backward; empty: they are only computed again")
    memory_store_limit: int = _knob(0, "bytes that may lie there at once, as a number or such as \"100GiB\"; 0: as "
                                       "many as the disk has", bytes_=True)
    calibrate: bool = _knob(True, "measure once how fast this machine multiplies and copies: which routines do "
                                  "products (see products), and what calls under a limit compute again; off: the "
                                  "usual ones")
    products: str = _knob("measured", "which routines do matrix products that our own ones and a library's can do: "
                                      "measured (the faster ones on this machine; with calibrate off as usual), own, "
                                      "library, or usual (by the processor's features); on a GPU own fuses them into "
                                      "the kernels that read them",
                          choices=("measured", "own", "library", "usual"))
    planning_seconds: int = _knob(0, "seconds of processor time that an integer program (HiGHS, in `anyshape[plan]`) "
                                     "may look for a better order of a program's steps, where the search leaves room")
    device_graphs: int = _knob(0, "on a GPU: after so many calls of the same addresses, a program whose steps are all "
                                  "kernels, products and copies is issued as one CUDA graph (HIP graph); 0: never")
    dynamic: bool = _knob(True, "make every size symbolic from the first call")
    defer: bool = _knob(True, "calls whose sizes of 0 or 1 need one more program run as PyTorch does until they "
                              "have taken as long as tracing it takes")
    background: bool = _knob(False, "trace and compile in a thread of its own; calls run as PyTorch does until then")
    fullgraph: bool = _knob(False, "refuse graph breaks")
    disable: str = _knob("", "comma-separated names of what to leave out, to bisect or to see what it gives: passes "
                             "over graphs and plans; "
                             "attention: leave it as it is written; regimes: one version of each kernel; order: steps "
                             "run as they were traced; output_reuse: no value lies in a result or over another; "
                             "epilogues: no kernel runs with the product before it, in bands or not; fast_dispatch: "
                             "calls go through Dynamo's and AOTAutograd's wrappers; row_tiling: no chain of products "
                             "runs by bands of rows")

    @staticmethod
    def make(**overrides: Any) -> Config:
        """A config from `overrides`, then the environment (`ANYSHAPE_<FIELD>`), then the defaults.

        Raises:
            ConfigError: as the class does; also of a variable of the environment.
        """
        known = {f.name: f for f in fields(Config)}
        values: dict[str, Any] = {}
        for name in os.environ:
            if name.startswith("ANYSHAPE_") and name[len("ANYSHAPE_"):].lower() not in known:
                _warn_of_variable(name)
        for name, knob in known.items():
            text = os.environ.get(f"ANYSHAPE_{name.upper()}")
            if text is not None:
                values[name] = bytes_of(f"ANYSHAPE_{name.upper()}", text) if knob.metadata["bytes"] else \
                    _read(name, text, type(knob.default))
        return Config(**{**values, **overrides})

    def __post_init__(self) -> None:
        """Checks every field, and has it in one form: bytes as a whole number, a path as its text."""
        for knob in fields(self):
            object.__setattr__(self, knob.name, _checked(knob, getattr(self, knob.name)))

    @property
    def limited(self) -> bool:
        """Whether programs keep to a limit in bytes."""
        return bool(self.memory_limit or self.memory_limit_total)

    @property
    def products_mode(self) -> str:
        """`products`, where nothing is to be measured without that."""
        return "usual" if self.products == "measured" and not self.calibrate else self.products

    @property
    def waits(self) -> bool:
        """Whether a call may run as PyTorch for now rather than wait for a trace: what runs so keeps to no limit."""
        return self.defer and not (self.strict or self.limited)

    @property
    def beside(self) -> bool:
        """Whether programs are traced in a thread of its own; see `waits`."""
        return self.background and not (self.strict or self.limited)

    def disabled(self) -> frozenset[str]:
        """The names in `disable`."""
        return frozenset(filter(None, map(str.strip, self.disable.split(","))))

    def replace(self, **overrides: Any) -> Config:
        """A copy with some fields changed; it raises as the class does."""
        return dataclasses.replace(self, **overrides)


def _checked(knob: dataclasses.Field[Any], value: Any) -> Any:
    """The value of a field in its one form.

    Raises:
        ConfigError: it is of another type, out of range, or none of the choices.
    """
    name = knob.name
    wanted: Any = type(knob.default)
    if knob.metadata["bytes"]:
        value = 0 if value is None else bytes_of(f"setting {name}", value)  # None: no limit
    elif wanted is str and isinstance(value, os.PathLike):
        value = os.fspath(value)
    elif wanted is int and isinstance(value, numbers.Integral) and not isinstance(value, bool):
        value = int(value)  # numpy's
    if not isinstance(value, wanted) or (wanted is int and isinstance(value, bool)):
        raise ConfigError(f"setting {name} is {value!r:.80}", why=f"it is {KINDS[wanted]}",
                          do=f"pass {KINDS[wanted]}")
    least, most = knob.metadata["least"], knob.metadata["most"]
    if wanted is int and not least <= value <= most:
        raise ConfigError(f"setting {name} is {value}", do="set another number",
                          why=f"it is at least {least}" + (f" and at most {most}" if most < LARGEST or value > most
                                                           else ""))
    choices = knob.metadata["choices"]
    if choices and value not in choices:
        raise ConfigError(f"setting {name} is {value!r:.80}", why=f"it is one of {', '.join(choices)}",
                          do=f"set another one{_nearest(value, choices)}")
    if wanted is str and "\0" in value:
        raise ConfigError(f"setting {name} is {value!r:.80}", why="it has a character of number 0",
                          do="leave that character out")
    return value


def _nearest(name: str, known: Any) -> str:
    import difflib  # for mistakes only
    near = difflib.get_close_matches(name, list(known), 1)
    return f": perhaps {near[0]}" if near else ""


def visible_devices(kind: str) -> tuple[str, str | None]:
    """The variable of the environment by which a vendor's driver hides devices, and its value; None: it is not set."""
    names = {"cuda": ("CUDA_VISIBLE_DEVICES",), "hip": ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")}[kind]
    name = next((one for one in names if one in os.environ), names[0])
    return name, os.environ.get(name)


@functools.cache
def _warn_of_variable(name: str) -> None:
    """Says once that a variable of the environment sets nothing, where it looks like one of a setting."""
    import difflib  # for mistakes only
    near = difflib.get_close_matches(name[len("ANYSHAPE_"):].lower(), [f.name for f in fields(Config)], 1)
    if near:
        warnings.warn(f"the variable {name} of the environment sets nothing\n  why: there is no such setting\n"
                      f"  do:  perhaps ANYSHAPE_{near[0].upper()} is meant", stacklevel=4)


def _read(name: str, text: str, wanted: type) -> Any:
    if wanted is bool:
        lowered = text.strip().lower()
        if lowered not in ("0", "1", "true", "false"):
            raise ConfigError(f"ANYSHAPE_{name.upper()} is {text!r}", why="it is a switch", do="set it to 0 or 1")
        return lowered in ("1", "true")
    if wanted is int:
        if not text.strip().lstrip("-").isdigit():
            raise ConfigError(f"ANYSHAPE_{name.upper()} is {text!r}", why="it is a whole number", do="set a number")
        return int(text)
    return text
