"""Each simulated rank has its own copy of each class that goes by value, such as a notebook's.

The methods of a class refer to global variables, which are the rank's own. Copies of one class are
recognized by the id that cloudpickle gives it. So an object that goes from rank to rank arrives as
an instance of the receiver's class; what a rank returns, as one of the caller's.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any
from weakref import WeakSet

from cloudpickle.cloudpickle import _DYNAMIC_CLASS_TRACKER_BY_CLASS, _class_setstate

from dtlab.ranks.pickling import ReadablePickler

Classes = dict[str, type]  # by their ids
# Those of the rank that runs; None outside of ranks. Each strand has a context of its own.
CLASSES: ContextVar[Classes | None] = ContextVar("classes", default=None)
_complete: WeakSet[type] = WeakSet()  # not empty any more


def dumps(value: Any) -> bytes:
    """Return `value`, pickled by cloudpickle."""
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return file.getvalue()


def loads(pickled: bytes, classes: Classes | None) -> Any:
    """Load what `dumps` has pickled, with instances of `classes`, as far as these hold them."""
    before = CLASSES.set(classes)
    try:
        return pickle.loads(pickled)
    finally:
        CLASSES.reset(before)


class _Pickler(ReadablePickler):
    def reducer_override(self, x: Any) -> Any:
        return of_rank(x, super().reducer_override(x), CLASSES.get())


def of_rank(x: Any, reduced: Any, classes: Classes | None) -> Any:
    """Return what to pickle in place of what cloudpickle has `reduced` `x` to. A class that goes by
    value is noted in `classes`."""
    if not isinstance(x, type) or not isinstance(reduced, tuple) or len(reduced) < 6:
        return reduced
    make, args, state, *_ = reduced
    if classes is not None:
        classes.setdefault(args[-2], x)
    _complete.add(x)
    return _rebuild, (make, args), state, None, None, _fill


def _rebuild(make: Callable[..., type], args: tuple[Any, ...]) -> type:
    """The class here that is a copy of that one; an empty one, if there is none yet."""
    classes = CLASSES.get()
    if classes is None:
        return make(*args)
    *about, number, more = args
    if number not in classes:
        classes[number] = cls = make(*about, None, more)
        _DYNAMIC_CLASS_TRACKER_BY_CLASS[cls] = number
    return classes[number]


def _fill(cls: type, state: Any) -> None:
    if cls not in _complete:
        _complete.add(cls)
        _class_setstate(cls, state)
