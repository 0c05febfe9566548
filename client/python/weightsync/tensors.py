"""What users hand over (numpy arrays, torch tensors of any kind) as parts of parameters in memory."""

from __future__ import annotations

import dataclasses
import math
import sys
from typing import Any, Callable, Dict, Iterable, Iterator, List, Mapping, Optional, Sequence, Tuple, Union

import numpy

from . import sharding
from .enums import DType, pick
from .errors import InvalidArgumentError, UnimplementedError, invalid

# name of the numpy or torch type -> DType
_DTYPES = {
    "bool": DType.BOOL,
    "uint8": DType.U8,
    "int8": DType.I8,
    "float8_e5m2": DType.F8_E5M2,
    "float8_e4m3fn": DType.F8_E4M3,
    "int16": DType.I16,
    "uint16": DType.U16,
    "float16": DType.F16,
    "bfloat16": DType.BF16,
    "int32": DType.I32,
    "uint32": DType.U32,
    "float32": DType.F32,
    "int64": DType.I64,
    "uint64": DType.U64,
    "float64": DType.F64,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

DTypeLike = Union[DType, str, Any]


def torch() -> Any:
    """The torch module if this program uses it, else None: nothing here imports it by itself."""
    return sys.modules.get("torch")


def is_torch(value: Any) -> bool:
    module = torch()
    return module is not None and isinstance(value, module.Tensor)


def to_dtype(value: DTypeLike, name: str = "") -> DType:
    """DType of a numpy or torch type, of its name, or of safetensors' name for it."""
    if isinstance(value, DType):
        return value
    if isinstance(value, str) and value.upper() in DType.__members__:
        return DType(pick(DType, value))
    text = str(value)
    if text.startswith("torch."):
        text = text[6:]
    elif text not in _DTYPES:
        try:
            text = numpy.dtype(value).name
        except TypeError:
            pass
    found = _DTYPES.get(text)
    if found is None:
        raise invalid("DTYPE_UNKNOWN", f"{name + ': ' if name else ''}{value} cannot be moved.")
    return found


def numpy_dtype(dtype: DType) -> numpy.dtype:
    name = _NAMES[dtype]
    try:
        return numpy.dtype(name)
    except TypeError:
        try:
            import ml_dtypes
        except ImportError:
            raise invalid(
                "DTYPE_UNKNOWN", f"numpy knows {name} only with the package ml_dtypes; install it."
            ) from None
        return numpy.dtype(getattr(ml_dtypes, name))


def torch_dtype(dtype: DType) -> Any:
    return getattr(torch(), _NAMES[dtype])


@dataclasses.dataclass
class Part:
    """A box of a parameter, and the array that holds it."""

    name: str
    dtype: DType
    # Of the whole parameter.
    shape: Tuple[int, ...]
    # None: all of it.
    offset: Optional[Tuple[int, ...]]
    extent: Optional[Tuple[int, ...]]
    # A numpy array or a torch tensor whose shape is the box.
    array: Any
    component: str = ""

    @property
    def box_extent(self) -> Tuple[int, ...]:
        return self.shape if self.extent is None else self.extent

    @property
    def size_bytes(self) -> int:
        return math.prod(self.box_extent) * self.dtype.itemsize

    # What the C ABI asks for. Only of arrays in this process's memory that have the part's type.
    @property
    def address(self) -> int:
        if isinstance(self.array, numpy.ndarray):
            return self.array.__array_interface__["data"][0]
        return self.array.data_ptr()

    @property
    def strides(self) -> Tuple[int, ...]:
        if isinstance(self.array, numpy.ndarray):
            return tuple(s // self.array.itemsize for s in self.array.strides)
        return tuple(self.array.stride())

    def span_bytes(self) -> int:
        """From the first to behind the last element."""
        reach = sum((n - 1) * s for n, s in zip(self.box_extent, self.strides))
        return (reach + 1) * self.stored_dtype().itemsize

    def stored_dtype(self) -> DType:
        return to_dtype(self.array.dtype, self.name)

    def block_cast(self) -> bool:
        """Whether it becomes fp8 with scales, of which the daemon makes a tensor `name`_scale_inv."""
        return self.dtype == DType.F8_E4M3 and self.stored_dtype() == DType.BF16 and len(self.shape) == 2

    def cast_by_daemon(self) -> bool:
        """Whether it may be read as it is stored, and is cast then: TensorShard.dtype of the protocol."""
        if self.stored_dtype() == DType.F32 and self.dtype in (DType.BF16, DType.F16):
            return True
        return self.block_cast()

    def copied_dtype(self) -> DType:
        """Of a copy for the daemon: as it is moved, but where only the daemon can make that of it."""
        return self.stored_dtype() if self.block_cast() else self.dtype

    def on_device(self) -> bool:
        return not isinstance(self.array, numpy.ndarray) and self.array.device.type != "cpu"

    @property
    def on_gpu(self) -> bool:
        """On a GPU whose memory the library knows."""
        return self.on_device() and self.array.device.type == "cuda"

    def in_place(self) -> bool:
        """The memory is this process's own, and holds elements at whole strides that need no cast here."""
        if self.on_device() and not self.on_gpu:
            return False
        if self.stored_dtype() != self.dtype and not self.cast_by_daemon():
            return False
        if isinstance(self.array, numpy.ndarray):
            return all(s >= 0 and s % self.array.itemsize == 0 for s in self.array.strides)
        return True

    def describe(self) -> Tuple[Any, ...]:
        """What must be equal for another tensor to take this one's place."""
        return (self.name, self.dtype, self.shape, self.offset, self.extent, self.component)

    def narrowed(self, dim: int, start: int, length: int) -> Any:
        """A view of `length` rows of the box from `start` of it."""
        index = tuple(slice(start, start + length) if d == dim else slice(None) for d in range(len(self.shape)))
        return self.array[index]


@dataclasses.dataclass(frozen=True)
class Shard:
    """A part of a parameter, said by hand: `tensor` is the box at `offset` of the global `shape`."""

    tensor: Any
    offset: Sequence[int]
    shape: Sequence[int]


@dataclasses.dataclass(frozen=True)
class Component:
    """A tensor of another component of the model than "main", for example of its draft."""

    tensor: Any
    component: str


def parts_of(name: str, value: Any, component: str = "") -> List[Part]:
    """What this process holds of one parameter; none when it got no element of it."""
    if isinstance(value, Component):
        return parts_of(name, value.tensor, value.component)
    if not name:
        raise invalid("PARAMETER_NAME_INVALID", "A tensor has no name.")
    if isinstance(value, Shard):
        array = value.tensor.detach() if is_torch(value.tensor) else value.tensor
        shape, offset = tuple(value.shape), tuple(value.offset)
        if 0 in array.shape:
            return []
        return [Part(name, to_dtype(array.dtype, name), shape, offset, tuple(array.shape), array, component)]
    if isinstance(value, numpy.ndarray):
        return [Part(name, to_dtype(value.dtype, name), value.shape, None, None, value, component)]
    if not is_torch(value):
        raise InvalidArgumentError(
            "TENSOR_UNKNOWN",
            f"{name}: a {type(value).__name__} is no tensor; give numpy arrays or torch tensors.",
        )
    if _is_dtensor(value):
        return _dtensor_parts(name, value, component)
    value = value.detach()
    module = torch()
    if value.layout != module.strided or value.is_quantized:
        raise invalid("TENSOR_UNKNOWN", f"{name}: only dense tensors can be moved; it is {value.layout}.")
    if value.device.type == "meta":
        raise invalid("TENSOR_UNKNOWN", f"{name}: it is on the meta device and has no memory.")
    if value.is_conj() or value.is_neg():
        value = value.resolve_conj().resolve_neg()
    return [Part(name, to_dtype(value.dtype, name), tuple(value.shape), None, None, value, component)]


def _is_dtensor(value: Any) -> bool:
    return hasattr(value, "placements") and hasattr(value, "device_mesh") and hasattr(value, "to_local")


def _placement(name: str, placement: Any) -> sharding.Placement:
    # Its class before Shard: it may derive from it.
    kind = type(placement).__name__
    if kind == "_StridedShard":
        return sharding.Placement("strided", placement.dim, placement.split_factor)
    if placement.is_partial():
        sharding.refuse_partial(name)
    if placement.is_replicate():
        return sharding.Placement("replicate")
    if placement.is_shard() and kind == "Shard":
        return sharding.Placement("shard", placement.dim)
    raise UnimplementedError("PLACEMENT_UNKNOWN", f"{name}: the placement {placement} is not known here.")


def _dtensor_parts(name: str, value: Any, component: str) -> List[Part]:
    placements = [_placement(name, placement) for placement in value.placements]
    mesh = value.device_mesh
    shape = tuple(value.shape)
    local = value.to_local().detach()
    boxes = sharding.placement_boxes(shape, tuple(mesh.shape), mesh.get_coordinate(), placements)
    boxes = [box for box in boxes if 0 not in box.extent]
    held = sum(math.prod(box.extent) for box in boxes)
    if held != local.numel():
        # A wrong guess would send rows to wrong places without a word.
        raise UnimplementedError(
            "PLACEMENT_UNKNOWN",
            f"{name}: {held} elements were expected here from {value.placements} over a mesh of "
            f"{tuple(mesh.shape)}, and {local.numel()} are; this torch lays it out in another way.",
        )
    found = []
    for box in boxes:
        view = local[tuple(slice(o, o + n) for o, n in zip(box.local_offset, box.extent))]
        whole = box.extent == shape
        found.append(
            Part(
                name,
                to_dtype(local.dtype, name),
                shape,
                None if whole else box.offset,
                None if whole else box.extent,
                view,
                component,
            )
        )
    return found


def _fsdp1_parts(module: Any) -> Optional[List[Part]]:
    """What a module holds of which FSDP (version 1) wrapped some or all; None when it wrapped nothing.

    Flat shards, and whole what it left out: ignored modules, and what is around wrapped ones.
    """
    found: List[Part] = []
    seen = False
    flat_names = set()
    for prefix, wrapped in module.named_modules():
        handle = getattr(wrapped, "_handle", None)
        flat = getattr(handle, "flat_param", None)
        if flat is None or not hasattr(flat, "_shard_param_infos"):
            continue
        seen = True
        prefix = _clean(prefix)
        local = flat._local_shard if hasattr(flat, "_local_shard") else flat
        local = local.detach()
        for fqn, shape, info in zip(flat._fqns, flat._shapes, flat._shard_param_infos):
            name = f"{prefix}.{_clean(fqn)}" if prefix else _clean(fqn)
            flat_names.add(name)
            if not info.in_shard:
                continue
            # intra_param_end_idx is the last element, not the one behind it.
            begin, length = info.intra_param_start_idx, info.numel_in_shard
            for offset, extent, position in sharding.flat_boxes(tuple(shape), begin, length):
                start = info.offset_in_shard + position
                array = local[start : start + math.prod(extent)].view(extent)
                found.append(
                    Part(name, to_dtype(local.dtype, name), tuple(shape), offset, extent, array)
                )
        # Tied within the flat parameter, which has them once.
        for tied in getattr(flat, "_shared_param_infos", ()):
            path = _clean(f"{tied.module_name}.{tied.param_name}" if tied.module_name else tied.param_name)
            flat_names.add(f"{prefix}.{path}" if prefix else path)
    if not seen:
        return None
    for name, parameter in module.named_parameters():
        if hasattr(parameter, "_shard_param_infos"):
            continue  # a flat one
        name = _clean(name)
        if name not in flat_names:
            found += parts_of(name, parameter)
    for name, buffer in module.named_buffers():
        name = _clean(name)
        owner, _, leaf = name.rpartition(".")
        del owner
        if name not in flat_names and leaf not in _non_persistent(module, name):
            found += parts_of(name, buffer)
    return found


def _non_persistent(module: Any, name: str) -> Any:
    owner = module
    for step in name.split(".")[:-1]:
        owner = getattr(owner, "_fsdp_wrapped_module", owner)
        owner = getattr(owner, step, owner)
    return getattr(getattr(owner, "_fsdp_wrapped_module", owner), "_non_persistent_buffers_set", ())


def _clean(name: str) -> str:
    """Without what wrappers put into names."""
    for wrapper in ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod", "_flat_param"):
        name = name.replace(f"{wrapper}.", "").removesuffix(f".{wrapper}") if name != wrapper else ""
    return name


Weights = Union[Mapping[str, Any], Iterable[Tuple[str, Any]], Any]


def named_tensors(weights: Weights) -> Iterator[Tuple[str, Any]]:
    """(name, tensor) of a state_dict, a torch module or an iterable of pairs."""
    if hasattr(weights, "state_dict") and hasattr(weights, "named_parameters"):
        # DDP's wrapper adds "module." to names.
        inner: Any = weights
        if type(weights).__name__ == "DistributedDataParallel":
            inner = inner.module
        for name, value in inner.state_dict().items():
            # What get_extra_state returns may be anything.
            if is_torch(value):
                yield _clean(name), value
        return
    pairs = weights.items() if isinstance(weights, Mapping) else weights
    try:
        iterator = iter(pairs)
    except TypeError:
        raise invalid(
            "TENSOR_UNKNOWN",
            f"a {type(weights).__name__} is no set of weights: give a state_dict, a torch module or pairs of "
            "name and tensor.",
        ) from None
    for pair in iterator:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not isinstance(pair[0], str):
            raise invalid("TENSOR_UNKNOWN", "weights are pairs of a name and a tensor.")
        yield pair[0], pair[1]


def kept(weights: Weights) -> Weights:
    """Weights that can be gone through more than once."""
    if hasattr(weights, "state_dict") or isinstance(weights, Mapping):
        return weights
    return list(named_tensors(weights))


def all_parts(weights: Weights) -> List[Part]:
    if hasattr(weights, "named_modules"):
        flat = _fsdp1_parts(weights)
        if flat is not None:
            return flat
    found: List[Part] = []
    for name, value in named_tensors(weights):
        found += parts_of(name, value)
    for part in found:
        if 0 in part.shape:
            raise invalid("SHAPE_INVALID", f"{part.name}: {list(part.shape)} has no elements.")
    return found


def drop_tied(parts: Sequence[Part]) -> Tuple[List[Part], Dict[str, str]]:
    """Without parts that lie where another one lies; dropped name -> the name that is kept."""
    first: Dict[Tuple[Any, ...], str] = {}
    kept: List[Part] = []
    dropped: Dict[str, str] = {}
    for part in parts:
        key = (str(getattr(part.array, "device", "")), part.address, part.strides, part.box_extent, part.offset)
        name = first.setdefault(key, part.name)
        if name == part.name:
            kept.append(part)
        else:
            dropped[part.name] = name
    return kept, dropped


Cast = Union[None, DTypeLike, Mapping[str, DTypeLike], Callable[[str], Optional[DTypeLike]]]


def cast(parts: Sequence[Part], to: Cast) -> None:
    """Sets the types in which floating-point parts are moved; `to` as Trainer takes it."""
    if to is None:
        return
    for part in parts:
        wanted: Any
        if isinstance(to, Mapping):
            wanted = to.get(part.name)
        elif callable(to) and not isinstance(to, type) and not isinstance(to, numpy.dtype):
            wanted = to(part.name)
        else:
            wanted = to if part.dtype.floating else None
        if wanted is None:
            continue
        dtype = to_dtype(wanted, part.name)
        if dtype.floating != part.dtype.floating:
            raise invalid(
                "DTYPE_MISMATCH",
                f"{part.name}: {part.dtype.name} is not cast to {dtype.name}; only floating point is.",
            )
        part.dtype = dtype


def empty_like_moved(part: Part) -> Any:
    """A dense tensor beside the part's, on the same device, of the type in which it is moved."""
    return part.array.new_empty(part.box_extent, dtype=torch_dtype(part.dtype))


def copy_into(part: Part, target: numpy.ndarray) -> None:
    """Copies a part into `target`, dense, as elements of its copied_dtype()."""
    source = part.array
    if isinstance(source, numpy.ndarray):
        view = target.view(numpy_dtype(part.copied_dtype())).reshape(part.box_extent)
        numpy.copyto(view, source, casting="unsafe")
        return
    module = torch()
    view = module.from_numpy(target).view(torch_dtype(part.copied_dtype())).view(part.box_extent)
    view.copy_(source)
