"""Pickle batches so that they are, in the parent, objects of the parent's own classes.

A pipeline reaches its workers through cloudpickle, which includes classes of the main program and
of functions by value. When instances of them come back, they must be instances of the classes that
the training program knows: cloudpickle gives each such class an id, by which it is found again;
other classes are looked up by name in the main program.

Arrays and tensors are sent over their own bytes. If something in a pipeline cannot be pickled, the
error names it.
"""

from __future__ import annotations

import copyreg
import gc
import io
import pickle
import pickletools
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass
from functools import lru_cache, partial
from pickle import PickleBuffer
from types import FunctionType, MemberDescriptorType, MethodType
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakValueDictionary

import cloudpickle
import numpy as np
from cloudpickle import cloudpickle as tracking

from energon.errors import ConfigError
from energon.samples.provenance import reduce_sources
from energon.worker import WorkerConfig

T = TypeVar("T")
MAX_PICKLED_DEPTH = 100


def find_unpicklable(value: Any, pickles: Callable[[Any], object]) -> str:
    """Return the innermost object in `value` on which `pickles` fails, named as a user would.

    Args:
        value: An object on which it fails.
        pickles: Pickles a value, or raises.

    Example:
        >>> import pickle, threading
        >>> from types import SimpleNamespace
        >>> find_unpicklable([1, SimpleNamespace(guard=threading.Lock())], pickle.dumps)
        'SimpleNamespace.guard'
    """
    name = type(value).__name__
    for _ in range(MAX_PICKLED_DEPTH):
        failing = next((each for each in _inside(value) if _fails(pickles, each[1])), None)
        if failing is None:
            break
        inner, value = failing
        name = name + inner if inner.startswith("[") else inner
    return name


def _inside(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the values in `value`, with names."""
    owner = type(value).__name__
    if isinstance(value, MethodType):
        yield type(value.__self__).__name__, value.__self__
    elif isinstance(value, FunctionType):
        yield from _used_by(value)
    elif isinstance(value, Mapping):
        yield from ((f"[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, list | tuple):
        yield from ((f"[{index}]", item) for index, item in enumerate(value))
    elif is_dataclass(value) and not isinstance(value, type):
        names = (field.name for field in fields(value))
        yield from ((f"{owner}.{name}", getattr(value, name)) for name in names)
    else:
        held = getattr(value, "__dict__", {})
        yield from ((f"{owner}.{name}", item) for name, item in held.items())
        methods = (item for item in vars(type(value)).values() if isinstance(item, FunctionType))
        yield from ((method.__qualname__, method) for method in methods)


def _used_by(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the variables of enclosing functions and of the module that `function` uses."""
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # not assigned yet
            yield f"{name}, which {function.__qualname__} uses,", cell.cell_contents
    for name in code.co_names:
        if name in function.__globals__:
            yield f"{name}, which {function.__qualname__} uses,", function.__globals__[name]


def _fails(pickles: Callable[[Any], object], value: Any) -> bool:
    try:
        pickles(value)
    except Exception:
        return True
    return False


PROTOCOL = 5
OUT_OF_BAND_BYTES = 1 << 14
"""Up to about this size, it is faster to copy buffers with the rest."""

_MAIN = ("__main__", "__mp_main__")
"""Names of the main program; the second one is used in processes spawned by multiprocessing."""


class BatchPickler(pickle.Pickler):
    """Writes pickles to `file` and collects big buffers separately in `buffers`."""

    def __init__(self, file: Any) -> None:
        self.buffers: list[pickle.PickleBuffer] = []
        super().__init__(file, PROTOCOL, buffer_callback=self._take_buffer)
        self._kinds: dict[type, Callable[[Any], Any] | None] = {
            FunctionType: _reduce_named,
            np.ndarray: reduce_array,
        }
        self._tensors: TensorReducer | None = None

    def dump(self, value: Any) -> None:
        """Write one pickle, which shares nothing with others."""
        self.buffers.clear()
        try:
            super().dump(value)
        finally:
            self.clear_memo()
            if self._tensors is not None:
                self._tensors.clear()

    def release(self) -> None:
        """Release the buffers of the last pickle, the only ones that keep what it was made of.

        The next batch then reuses its memory, which is still in the processor cache.
        """
        self.buffers.clear()

    def reducer_override(self, value: Any) -> Any:
        """Return how to rebuild `value`, or leave it to pickle."""
        kind = type(value)
        try:
            reduce = self._kinds[kind]
        except KeyError:
            reduce = self._kinds[kind] = self._find(kind)
        return NotImplemented if reduce is None else reduce(value)

    def _find(self, kind: type) -> Callable[[Any], Any] | None:
        if issubclass(kind, type):
            return _reduce_named
        if issubclass(kind, BaseException):
            return _reduce_exception
        torch: Any = sys.modules.get("torch")
        if torch is not None and issubclass(kind, torch.Tensor):
            self._tensors = self._tensors or TensorReducer(torch)
            return self._tensors.reduce
        return _find_for_attributes(kind)

    def _take_buffer(self, buffer: pickle.PickleBuffer) -> bool:
        """Take `buffer` out of the pickle, unless it is small or not contiguous."""
        if memoryview(buffer).nbytes < OUT_OF_BAND_BYTES:
            return True
        self.buffers.append(buffer)
        return False


def _find_for_attributes(kind: type) -> Callable[[Any], Any] | None:
    """Return how to rebuild objects of which only the attributes are special, if they are."""
    if _copies_state(kind) and any(_lost_slots(each) for each in kind.__mro__):
        return _reduce_with_slots
    if "__sources__" in getattr(kind, "__dataclass_fields__", ()) and plain_slots(kind) is not None:
        return _reduce_with_sources
    return None


def _reduce_exception(error: BaseException) -> Any:
    """Reduce an exception as its class says.

    Packages such as tblib, which comes with Dask, replace this for all exception classes: some
    cannot be rebuilt then, and of others no constructor is called.
    """
    return error.__reduce_ex__(PROTOCOL)


@lru_cache(maxsize=256)
def plain_slots(kind: type) -> tuple[str, ...] | None:
    """Return the slots of a class if pickle would copy nothing but its attributes; else None.

    What a copy that has lost its slots keeps in a dict is not in slots.
    """
    own: tuple[Any, ...] = (kind.__new__, kind.__reduce__)
    special = ("__setstate__", "__getnewargs__", "__getnewargs_ex__")
    if not _copies_state(kind) or own != (object.__new__, object.__reduce__):
        return None
    if any(hasattr(kind, name) for name in special) or kind in copyreg.dispatch_table:
        return None
    names: list[str] = copyreg._slotnames(kind)  # type: ignore[attr-defined]
    own_slots = {
        name
        for each in kind.__mro__
        for name, value in vars(each).items()
        if type(value) is MemberDescriptorType
    }
    return tuple(name for name in names if name in own_slots)


def _copies_state(kind: type) -> bool:
    """Return whether pickle takes the attributes of instances itself."""
    own: tuple[Any, ...] = (kind.__getstate__, kind.__reduce_ex__)
    plain: tuple[Any, ...] = (object.__getstate__, object.__reduce_ex__)
    return own == plain


def _lost_slots(kind: type) -> bool:
    """Return whether the class is a copy that cloudpickle made without the slots it declares.

    Its instances keep in a dict what instances of the original keep in slots.
    """
    return "__slots__" in vars(kind) and is_copy(kind)


def is_copy(kind: type) -> bool:
    """Return whether the class is a copy that cloudpickle made."""
    return kind in tracking._DYNAMIC_CLASS_TRACKER_BY_CLASS


def _reduce_with_slots(value: Any) -> Any:
    kind: type = type(value)
    names = {*_names_of_slots(kind), *getattr(value, "__dict__", ())}
    state = {name: getattr(value, name) for name in names if hasattr(value, name)}
    if (sources := reduce_sources(state.get("__sources__"))) is not None:
        state["__sources__"] = sources
    return copyreg.__newobj__, (kind,), (None, state)  # type: ignore[attr-defined]


@lru_cache(maxsize=256)
def _names_of_slots(kind: type) -> frozenset[str]:
    return frozenset(n for each in kind.__mro__ for n in getattr(each, "__slots__", ()))


def _reduce_with_sources(value: Any) -> Any:
    """Reduce a batch, whose sources would take most of the time."""
    sources = reduce_sources(getattr(value, "__sources__", None))
    if sources is None:
        return NotImplemented
    state = value.__getstate__()
    if type(state) is tuple:  # one dict, and one of slots
        state = tuple(_with_sources(held, sources) for held in state)
    else:
        state = _with_sources(state, sources)
    return copyreg.__newobj__, (type(value),), state  # type: ignore[attr-defined]


def _with_sources(held: Any, sources: Any) -> Any:
    """Return some attributes, with `sources` if they have any."""
    return {**held, "__sources__": sources} if held and "__sources__" in held else held


def dump_pipeline(
    pipeline: Any, *, advice: str = "let them inherit it: start_method='fork'"
) -> bytes:
    """Pickle `pipeline` for workers, with what it uses from the main program.

    Args:
        pipeline: The pipeline.
        advice: How else the workers could have the pipeline, for messages.

    Raises:
        ConfigError: If something in it cannot be pickled.
    """
    try:
        return _dump(pipeline)
    except Exception as error:
        raise ConfigError(
            f"{find_unpicklable(pipeline, _dump)} cannot be sent to worker processes: {error}. "
            f"Create it in the hook that first needs it, or {advice}"
        ) from error


def _dump(value: Any) -> bytes:
    file = io.BytesIO()
    with _main_by_value():
        _PipelinePickler(file, protocol=PROTOCOL).dump(value)
    return file.getvalue()


@contextmanager
def _main_by_value() -> Iterator[None]:
    """Let cloudpickle include what belongs to the main program of a spawned process.

    It does so on its own if that program is called `__main__`.
    """
    main = sys.modules.get("__mp_main__")
    if main is None or main.__name__ in cloudpickle.list_registry_pickle_by_value():
        yield
        return
    cloudpickle.register_pickle_by_value(main)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(main)


def modules_named(pickled: bytes) -> list[str]:
    """Return the modules that a pickled pipeline names, of those that this process has imported.

    Pickles nest: cloudpickle writes functions and modules by name into their own arguments. So
    every string that is the name of a module counts. A wrong one costs time, nothing else.

    Example:
        >>> modules_named(pickle.dumps(io.StringIO))
        ['_io']
    """
    names = {
        argument for _, argument, _ in pickletools.genops(pickled) if isinstance(argument, str)
    }
    # GLOBAL, of old protocols, has module and name in one string.
    names |= {name.partition(" ")[0] for name in names}
    if "torch" in sys.modules and any("torch" in name for name in names):
        names.add("torch")
    return sorted(name for name in names - set(_MAIN) if name in sys.modules)


class _OwnPickler(pickle.Pickler):
    """Pickles objects of energon, and containers; refers to all others by their numbers."""

    def __init__(self, file: Any) -> None:
        super().__init__(file, PROTOCOL)
        self.others: list[Any] = []

    def persistent_id(self, value: Any) -> int | None:
        kind = type(value)
        if kind in _PLAIN or _is_own(kind):
            return None
        if kind is MethodType and _is_own(type(value.__self__)):
            return None
        self.others.append(value)
        return len(self.others) - 1


class _OwnUnpickler(pickle.Unpickler):
    def __init__(self, file: Any, others: Sequence[Any]) -> None:
        super().__init__(file)
        self._others = others

    def persistent_load(self, pid: Any) -> Any:
        return self._others[pid]


_PLAIN = frozenset(
    {
        *(type(None), bool, int, float, complex, str, bytes),
        *(dict, list, tuple, set, frozenset, OrderedDict, partial),
    }
)


def _is_own(kind: type) -> bool:
    module = kind.__module__
    return isinstance(module, str) and module.partition(".")[0] == "energon"


def copy_for_worker(pipeline: T) -> T:
    """Return an inherited pipeline with all of energon's objects as a new process would have them.

    These hold locks, files, threads and connections of the training process, and copies in other
    processes begin without them. What belongs to the program is not copied, whatever it holds.
    """
    file = io.BytesIO()
    pickler = _OwnPickler(file)
    pickler.dump(pipeline)
    file.seek(0)
    copied: T = _OwnUnpickler(file, pickler.others).load()
    return copied


class _PipelinePickler(cloudpickle.CloudPickler):  # type: ignore[misc]
    """Drops process groups: workers take no part in them."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, WorkerConfig):
            values = {**vars(value), "data_parallel_group": None, "replica": None}
            return partial(type(value), **values), ()
        return super().reducer_override(value)


def _reduce_named(named: Any) -> Any:
    """Reduce a class or a function."""
    if _is_importable(named):
        return NotImplemented
    if isinstance(named, type):
        tracked = tracking._DYNAMIC_CLASS_TRACKER_BY_CLASS.get(named)
        if tracked is not None:
            return tracked_class, (tracked, named.__module__, named.__qualname__)
    if named.__module__ in _MAIN and "<" not in named.__qualname__:
        return _attribute, (named.__module__, named.__qualname__)
    return _by_value(named)


def _is_importable(named: Any) -> bool:
    """Return whether another process can import `named`; it cannot import the main program."""
    module = named.__module__
    try:
        return module not in _MAIN and _attribute(module, named.__qualname__) is named
    except (KeyError, AttributeError):
        return False


def _by_value(named: Any) -> Reduced:
    """Return `named` pickled by cloudpickle, once for each class or function."""
    if named not in _BY_VALUE:
        if _inherits and isinstance(named, type) and _is_frozen(named):
            name = id(named), named.__module__, named.__qualname__
            _BY_VALUE[named] = inherited_class, name
        else:
            _BY_VALUE[named] = cloudpickle.loads, (cloudpickle.dumps(named),)
    return _BY_VALUE[named]


_BY_VALUE: WeakKeyDictionary[Any, Reduced] = WeakKeyDictionary()


def tracked_class(tracker_id: str, module: str, qualified_name: str) -> Any:
    """Return the class that this process has sent under `tracker_id`."""
    tracked = tracking._DYNAMIC_CLASS_TRACKER_BY_ID.get(tracker_id)
    return tracked if tracked is not None else _attribute(module, qualified_name)


_inherits = False
"""Whether this process is a fork of the one to which batches are sent."""


def send_as_inherited() -> None:
    """Refer to the classes for which garbage collection is frozen as inherited, from now on."""
    global _inherits
    _inherits = True


def _is_frozen(kind: type) -> bool:
    """Return whether a class existed when garbage collection was frozen."""
    return not any(each is kind for each in gc.get_objects())


def inherited_class(address: int, module: str, qualified_name: str) -> type:
    """Return the class of this process that a fork of it has inherited.

    Args:
        address: Its `id`.
        module: Its module.
        qualified_name: Its name.
    """
    name = address, module, qualified_name
    kind = _INHERITED.get(name) or _class_at(name)
    if kind is None:
        raise ConfigError(
            f"{module}.{qualified_name}: a batch is of this class, which was deleted here after "
            "the workers had started; keep a reference to it"
        )
    _INHERITED[name] = kind
    return kind


_INHERITED: WeakValueDictionary[tuple[int, str, str], type] = WeakValueDictionary()


def _class_at(name: tuple[int, str, str]) -> type | None:
    """Return the class with this `id`, module and name."""
    todo: list[type] = [object]
    seen: set[type] = set()
    while todo:
        children: list[type] = type.__subclasses__(todo.pop())
        for kind in children:
            if (id(kind), kind.__module__, kind.__qualname__) == name:
                return kind
            if kind not in seen:
                seen.add(kind)
                todo.append(kind)
    return None


def _attribute(module: str, qualified_name: str) -> Any:
    owner: Any = sys.modules[module]
    for name in qualified_name.split("."):
        owner = getattr(owner, name)
    return owner


_NUMBERS = frozenset("biufc")
"""Kinds of types whose names say everything about them; the others in numpy have parameters."""


def reduce_array(array: Any) -> Any:
    """Reduce a single array, with less to look up than numpy does."""
    dtype, flags = array.dtype, array.flags
    is_by_column = flags.f_contiguous and not flags.c_contiguous
    if dtype.kind not in _NUMBERS or not array.size or is_by_column:
        return NotImplemented
    content: Any = np.ascontiguousarray(array)
    return array_over_bytes, (PickleBuffer(content), dtype.str, array.shape)


def array_over_bytes(data: Any, dtype: str, shape: tuple[int, ...]) -> Any:
    """Return an array that is a view of `data`."""
    return np.frombuffer(data, dtype).reshape(shape)


WHOLE_STORAGE_RATIO = 2
"""A tensor that covers less than this share of its storage takes only its own elements along."""

Reduced = tuple[Callable[..., Any], tuple[Any, ...]]


class TensorReducer:
    """Reduces the tensors of one pickle, and remembers which storages it already contains."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._parameter = torch.nn.Parameter
        self._first_of: dict[int, Any] = {}

    def clear(self) -> None:
        """Forget the storages before the next pickle."""
        self._first_of.clear()

    def reduce(self, tensor: Any) -> Any:
        """Return the result of `reducer_override` for `tensor`.

        Subclasses, sparse and quantized tensors, and tensors with attributes set by programs are
        left to torch.
        """
        torch = self._torch
        kind = type(tensor)
        if kind is self._parameter:
            return self._parameter, (tensor.data, tensor.requires_grad)
        if kind is not torch.Tensor or tensor.layout is not torch.strided or tensor.__dict__:
            return NotImplemented
        if tensor.is_quantized or tensor.is_meta:
            return NotImplemented
        if not tensor.is_cpu:
            return on_device, (tensor.detach().cpu(), str(tensor.device), tensor.requires_grad)
        if tensor.requires_grad:
            return with_gradient, (tensor.detach(),)
        return self._reduce_plain(tensor.resolve_conj().resolve_neg())

    def _reduce_plain(self, tensor: Any) -> Reduced:
        storage = tensor.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
        first = self._first_of.get(address)
        if first is not None and first is not tensor:
            return self._view_of(first, tensor)
        if size == tensor.nbytes and tensor.is_contiguous():
            self._first_of[address] = tensor
            return self._over_bytes(tensor)
        if size > WHOLE_STORAGE_RATIO * tensor.nbytes:
            return self._over_bytes(tensor.clone(memory_format=self._torch.contiguous_format))
        whole = self._torch.empty(0, dtype=self._torch.uint8).set_(storage)
        self._first_of[address] = whole
        return self._view_of(whole, tensor)

    def _over_bytes(self, tensor: Any) -> Reduced:
        """Reduce a contiguous tensor that covers all of its storage."""
        shape = tuple(tensor.shape)
        if not tensor.nbytes:
            return empty, (shape, tensor.dtype)
        flat = tensor.reshape(-1)
        if flat.stride(0) != 1:  # a single element may have any, as in `values[::2]`
            flat = flat.as_strided((1,), (1,))
        content = PickleBuffer(flat.view(self._torch.uint8).numpy())
        return over_bytes, (content, tensor.dtype, shape)

    def _view_of(self, first: Any, tensor: Any) -> Reduced:
        """Reduce a tensor that shares the storage of `first`."""
        layout = tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
        return view_of, (first, tensor.dtype, *layout)


def over_bytes(content: Any, dtype: Any, shape: tuple[int, ...]) -> Any:
    """Return a tensor that is a view of `content`."""
    tensor = sys.modules["torch"].frombuffer(content, dtype=dtype)
    return tensor if len(shape) == 1 else tensor.view(shape)


def empty(shape: tuple[int, ...], dtype: Any) -> Any:
    """Return a tensor without elements."""
    return sys.modules["torch"].empty(shape, dtype=dtype)


def view_of(
    first: Any, dtype: Any, offset: int, shape: tuple[int, ...], stride: tuple[int, ...]
) -> Any:
    """Return another tensor on the storage of `first`."""
    torch = sys.modules["torch"]
    return torch.empty(0, dtype=dtype).set_(first.untyped_storage(), offset, shape, stride)


def with_gradient(tensor: Any) -> Any:
    """Return `tensor` as a leaf that requires gradients."""
    return tensor.requires_grad_()


def on_device(tensor: Any, device: str, requires_grad: bool) -> Any:
    """Return `tensor` on the device that it came from."""
    return tensor.to(device).requires_grad_(requires_grad)
