"""A device `sim` for tests: numbers in host memory, a device in every other respect.

Tensors of `sim` are plain tensors of torch's free backend (PrivateUse1), and their storages hold host memory. Each
operation runs on the CPU kernel, so its numbers are the CPU's. Operations that mix devices raise as on CUDA. What
makes the host wait is counted, memory is counted and can end, and a copy to the host that does not wait holds NaN
until the device was synchronized. Written for torch 2.13, whose Python interface to the backend is private.
"""

from __future__ import annotations

import gc
import sys
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import pytorch_lightning.accelerators as lightning
import torch
from pytorch_lightning.strategies import SingleDeviceStrategy
from pytorch_lightning.trainer.connectors.accelerator_connector import _AcceleratorConnector
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

if torch.cuda.is_available():  # whose place this device would take in the whole process
    pytest.skip("a real device is there; tests/test_real_device.py computes on it", allow_module_level=True)

aten = torch.ops.aten
KEY = "PrivateUse1"
CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
TRANSFORMS = torch._C.DispatchKeySet(torch._C.DispatchKey.FuncTorchDynamicLayerFrontMode)
TRANSFORMS |= torch._C.DispatchKeySet(torch._C.DispatchKey.FuncTorchDynamicLayerBackMode)
SET = aten.set_.source_Storage_storage_offset
WAITS = {  # operations whose result depends on numbers that the host must read first
    *(aten._local_scalar_dense.default, aten.equal.default, aten.nonzero.default, aten.masked_select.default),
    *(aten._unique2.default, aten.unique_consecutive.default, aten.unique_dim.default, aten.bincount.default),
    aten.repeat_interleave.Tensor,
}
INDEXING = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}  # take a CPU's indices
LOWER = "linear matmul mm bmm addmm addbmm baddbmm linalg_vecdot conv1d conv2d conv3d scaled_dot_product_attention"


class Generator(torch._C.Generator):
    """`torch.Generator` with a device: one of `sim` draws as the CPU's of the same seed."""

    of_sim: ClassVar = weakref.WeakValueDictionary[int, "Generator"]()  # by address

    def __new__(cls, device: Any = "cpu") -> Generator:
        made = super().__new__(cls)
        if torch.device(device).type == "sim":
            cls.of_sim[made._cdata] = made
        return made

    @property
    def device(self) -> torch.device:
        return SIM if self._cdata in self.of_sim else torch.device("cpu")


class Memory:
    """Host memory of one storage, counted for as long as the storage lives."""

    def __init__(self, host: torch.UntypedStorage) -> None:
        self.num_bytes = 0
        sim.allocate(host.nbytes())
        self.host, self.num_bytes = host, host.nbytes()

    def __del__(self) -> None:
        sim.allocated -= self.num_bytes


class Stream:
    """A stream or an event: waiting for it is waiting for the device."""

    def synchronize(self) -> None:
        sim.wait("synchronize")

    def record(self, stream: Any = None) -> None:
        pass

    record_event = wait_stream = wait_event = wait = record


class Module:
    """`torch.sim`: the functions that torch and Lightning call of a device's module, and what tests set and read.

    Attributes:
        waits: how often the host waited for the device, by operation and the package's line that caused it.
        limit: bytes that fit; None for no limit.
    """

    Stream = Event = Stream

    def __init__(self) -> None:
        self.plugged, self.limit, self.allocated, self.peak, self.total = False, None, 0, 0, 2**34
        self.waits: Counter[tuple[str, str]] = Counter()
        self.pending: list[tuple[Tensor, Tensor]] = []

    def wait(self, name: str) -> None:
        places = ((frame.f_code.co_filename, line) for frame, line in traceback.walk_stack(sys._getframe()))
        own = (f"{file.rpartition('/rm_optimizer/')[2]}:{line}" for file, line in places if "/rm_optimizer/" in file)
        self.waits[name, next(own, "")] += 1
        self.flush()

    def flush(self) -> None:
        for target, value in self.pending:
            target.copy_(value)
        self.pending.clear()

    def allocate(self, num_bytes: int) -> None:
        if self.limit is not None and self.allocated + num_bytes > self.limit:
            raise torch.OutOfMemoryError(f"sim out of memory. Tried to allocate {num_bytes} bytes.")
        self.allocated += num_bytes
        self.peak = max(self.peak, self.allocated)

    def synchronize(self, device: Any = None) -> None:
        self.wait("synchronize")

    def is_available(self) -> bool:
        return self.plugged

    def is_initialized(self) -> bool:
        return self.plugged

    def device_count(self) -> int:
        return int(self.plugged)

    def current_device(self) -> int:
        return 0

    def set_device(self, device: Any) -> None:
        assert torch.device(device).type == "sim" if isinstance(device, torch.device) else device == 0, device

    def _is_in_bad_fork(self) -> bool:
        return False

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def get_device_name(self, device: Any = None) -> str:
        return "Simulated"

    def get_device_properties(self, device: Any = None) -> SimpleNamespace:
        return SimpleNamespace(name="Simulated", total_memory=self.total)

    def manual_seed(self, seed: int) -> None:
        self.default.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_rng_state(self, device: Any = None) -> Tensor:
        return self.default.get_state()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        self.default.set_state(state)

    def get_rng_state_all(self) -> list[Tensor]:
        return [self.get_rng_state()]

    def set_rng_state_all(self, states: list[Tensor]) -> None:
        self.set_rng_state(*states)

    def empty_cache(self) -> None:
        pass

    def memory_allocated(self, device: Any = None) -> int:
        return self.allocated

    def max_memory_allocated(self, device: Any = None) -> int:
        return self.peak

    max_memory_reserved = max_memory_allocated

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        self.peak = self.allocated

    def current_stream(self, device: Any = None) -> Stream:
        return Stream()

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        total = self.limit or self.total
        return total - self.allocated, total


sim = Module()
_setup_privateuseone_for_python_backend("sim", backend_module=sim)
SIM = torch.device("sim", 0)
sim.default = Generator(SIM)


def on_sim(tensor: object) -> bool:
    return isinstance(tensor, Tensor) and tensor.device.type == "sim"


def host(tensor: Tensor) -> Tensor:
    """A CPU tensor over the memory of a tensor of the device."""
    memory = tensor.untyped_storage().memory  # type: ignore[attr-defined]
    return torch.empty(0, dtype=tensor.dtype).set_(memory.host, tensor.storage_offset(), tensor.shape, tensor.stride())


def placed(tensor: Tensor, into: Tensor | None = None) -> Tensor:
    """A tensor of the device over the memory of a CPU tensor; `into` becomes that tensor."""
    own = tensor.untyped_storage()
    storage = torch._C._construct_storage_from_data_pointer(own.data_ptr(), SIM, own.nbytes())
    storage.memory = Memory(own)  # lives as long as the storage, also where only C++ holds it
    into = torch._C._acc.create_empty_tensor((0,), tensor.dtype) if into is None else into
    SET.redispatch(CPU, into, storage, tensor.storage_offset(), tensor.shape, tensor.stride())
    return into


def run(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operation of the device by the CPU's kernel."""
    if op.is_view or op._schema.name == "aten::set_":  # only sizes and storages
        return op.redispatch(CPU, *args, **kwargs)
    if op is aten._fused_sdp_choice.default:
        return 0  # attention by plain products
    indices = args[1] if op._schema.name in INDEXING else ()
    if op in WAITS or any(on_sim(index) and index.dtype == torch.bool for index in indices):
        sim.wait(op._schema.name.removeprefix("aten::"))
    lowered: dict[int, tuple[Tensor, Tensor]] = {}
    strangers: list[Tensor] = []

    def lower(tensor: Tensor) -> Tensor:
        if tensor.device.type != "sim":
            strangers.append(tensor)
            return tensor
        below = host(tensor)
        lowered[id(below)] = tensor, below
        return below

    below_args = list(mapped(lower, args))
    for place in _tensor_places(op):  # torch writes a plain number as a number, also where a tensor is meant
        if place < len(args) and type(args[place]) in (int, float, bool):
            dtype = torch.result_type(below_args[0], args[place])
            below_args[place] = torch.tensor(args[place], dtype=dtype)
    below_kwargs = {name: mapped(lower, value) for name, value in kwargs.items() if name != "pin_memory"}
    if lowered and strangers and _mixes(op, args, kwargs, strangers, indices):
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, sim:0 and cpu! ({op})"
        )
    if "device" in below_kwargs:
        below_kwargs["device"] = torch.device("cpu")
    with torch._C._ExcludeDispatchKeyGuard(TRANSFORMS):
        if torch.Tag.nondeterministic_seeded in op.tags:
            result = _drawn(op, below_args, below_kwargs)
        else:
            result = op(*below_args, **below_kwargs)
        if op is aten._efficientzerotensor.default:  # zeros without memory, which only some of torch's kernels know
            result = torch.zeros(*below_args, **below_kwargs)
    for tensor, below in lowered.values():
        if below.shape != tensor.shape or below.stride() != tensor.stride():  # an output that was resized
            placed(below, tensor)
    return mapped(lambda found: lowered[id(found)][0] if id(found) in lowered else placed(found), result)


@cache
def _tensor_places(op: Any) -> list[int]:
    """Places after the first of arguments that must be tensors."""
    if torch._C._should_allow_numbers_as_tensors(op._schema.name.removeprefix("aten::")):
        return []
    return [place for place, argument in enumerate(op._schema.arguments) if place and str(argument.type) == "Tensor"]


def mapped(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """A value with its tensors changed, those in lists too."""
    if isinstance(value, Tensor):
        return change(value)
    return type(value)(mapped(change, each) for each in value) if type(value) in (list, tuple) else value


def _mixes(op: Any, args: Any, kwargs: Any, strangers: list[Tensor], indices: Any) -> bool:
    """True if a CPU tensor takes part that is neither a single number nor an index, or is written."""
    written = [
        args[place] if place < len(args) else kwargs.get(argument.name)
        for place, argument in enumerate(op._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    allowed = {id(index) for index in indices}
    return any(each.dim() and id(each) not in allowed for each in strangers) or any(
        isinstance(each, Tensor) and not on_sim(each) for each in written
    )


def _drawn(op: Any, args: Any, kwargs: Any) -> Any:
    """The result of an operation that draws: by the generator given, which must be the device's, or its default."""
    given = [value for value in (*args, *kwargs.values()) if isinstance(value, torch._C.Generator)]
    if given and given[0]._cdata not in Generator.of_sim:
        raise RuntimeError(f"Expected a 'sim' device type for generator but found 'cpu' ({op})")
    if given:
        return op(*args, **kwargs)
    before = torch.get_rng_state()
    torch.set_rng_state(sim.default.get_state())
    try:
        return op(*args, **kwargs)
    finally:
        sim.default.set_state(torch.get_rng_state())
        torch.set_rng_state(before)


def _empty(size: Any, *, dtype: Any = None, memory_format: Any = None, **options: Any) -> Tensor:
    return placed(torch.empty(size, dtype=dtype, memory_format=memory_format or torch.contiguous_format))


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, **options: Any) -> Tensor:
    return placed(torch.empty_strided(size, stride, dtype=dtype))


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    if on_sim(source) and on_sim(target):
        host(target).copy_(host(source))
    elif on_sim(target):
        if not non_blocking:
            sim.wait("upload")
        host(target).copy_(source)
    elif non_blocking and _is_pinned(target):
        target.fill_(torch.nan if target.is_floating_point() else -1)  # not there yet
        sim.pending.append((target, host(source).clone()))
    else:
        sim.wait("copy to the host")
        target.copy_(host(source))
    return target


def _to_copy(tensor: Tensor, *, device: Any = None, non_blocking: bool = False, **options: Any) -> Tensor:
    options = {name: options[name] for name in ("dtype", "memory_format") if options.get(name) is not None}
    copied = aten._to_copy.default(host(tensor) if on_sim(tensor) else tensor, **options)
    if device is None or device.type == "sim":
        if not on_sim(tensor) and not non_blocking:
            sim.wait("upload")
        return placed(copied)
    if non_blocking:
        _pin(copied)
        sim.pending.append((copied, copied.clone()))
        return copied.fill_(torch.nan if copied.is_floating_point() else -1)
    sim.wait("copy to the host")
    return copied


def _pin(tensor: Tensor, device: Any = None) -> Tensor:
    tensor.untyped_storage().pinned = True
    return tensor


def _is_pinned(tensor: Tensor, device: Any = None) -> bool:
    return hasattr(tensor.untyped_storage(), "pinned")


def _lower_precision(name: str) -> None:
    """Register what autocast does with an operation of the device: as on the CPU, in the lower precision."""
    packet = getattr(aten, name)
    key = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)

    def cast(value: Tensor) -> Tensor:
        is_wide = value.is_floating_point() and value.dtype != torch.float64 and on_sim(value)
        return value.to(torch.get_autocast_dtype("sim")) if is_wide else value

    def run_cast(*args: Any, **kwargs: Any) -> Tensor:
        with torch._C._ExcludeDispatchKeyGuard(key):
            return packet(*mapped(cast, args), **{key: mapped(cast, value) for key, value in kwargs.items()})

    LIBRARY.impl(name, run_cast, "AutocastPrivateUse1")


LIBRARY, FALLBACKS = torch.library.Library("aten", "IMPL"), torch.library.Library("_", "IMPL")
FALLBACKS.fallback(run, KEY)
FALLBACKS.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
for kernel in (("empty.memory_format", _empty), ("empty_strided", _empty_strided), ("_copy_from", _copy_from)):
    LIBRARY.impl(*kernel, KEY)
LIBRARY.impl("_to_copy", _to_copy, KEY)
for op in (aten.silu_backward.default, aten.native_layer_norm.default):  # else composed of others, with other rounding
    LIBRARY.impl(op, partial(run, op), KEY)
for each in LOWER.split():
    _lower_precision(each)


def _restore(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage | None:
    if not str(location).startswith("sim"):
        return None
    return placed(torch.empty(0, dtype=torch.uint8).set_(storage)).untyped_storage()


torch.serialization.register_package(5, lambda s: "sim:0" if s.device.type == "sim" else None, _restore)


class Accelerator(lightning.Accelerator):
    """Lightning's view of the device."""

    def setup_device(self, device: torch.device) -> None:
        assert device == SIM

    def setup(self, trainer: Any) -> None:
        trainer.precision_plugin.device = "sim"  # Lightning takes any mixed precision but the CPU's for CUDA's

    def teardown(self) -> None:
        pass

    @staticmethod
    def parse_devices(devices: Any) -> int:
        return int(devices)

    @staticmethod
    def get_parallel_devices(devices: int) -> list[torch.device]:
        return [SIM] * devices

    @staticmethod
    def auto_device_count() -> int:
        return 1

    @staticmethod
    def is_available() -> bool:
        return sim.plugged

    @staticmethod
    def name() -> str:
        return "sim"


lightning.AcceleratorRegistry.register("sim", Accelerator)
_storage_cpu, _storage_clone = torch.UntypedStorage.cpu, torch.UntypedStorage.clone
_accelerator, _strategy = torch.accelerator.current_accelerator, _AcceleratorConnector._choose_strategy


def _cpu_storage(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    if storage.device.type != "sim":
        return _storage_cpu(storage)
    sim.wait("copy to the host")
    return storage.memory.host.clone()


def _cloned_storage(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    return _restore(storage.memory.host.clone(), "sim") if storage.device.type == "sim" else _storage_clone(storage)


# Private to torch 2.13: only C++ could give the backend an allocator, generators and pinned memory.
torch.UntypedStorage.cpu, torch.UntypedStorage.clone = _cpu_storage, _cloned_storage
torch.accelerator.current_accelerator = lambda check_available=False: SIM if sim.plugged else None


class Draws(TorchFunctionMode):
    """Refusal of the device's generators by operations of the CPU, for which torch's own generators have a device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = (kwargs or {}).get("generator")
        if given is not None and given.device.type == "sim" and isinstance(result, Tensor) and not on_sim(result):
            raise RuntimeError(f"Expected a 'cpu' device type for generator but found 'sim' ({func.__name__})")
        return result


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[Module]:
    """The device, plugged in for one test: torch and Lightning find it as the accelerator of this machine."""
    with plugged():
        yield sim


@contextmanager
def plugged() -> Iterator[Module]:
    """Plug the device in, with no limit of memory and counters at zero."""
    gc.collect()  # else what earlier runs left counts as memory in use, and goes at some moment
    sim.plugged, sim.limit, sim.peak = True, None, sim.allocated
    sim.waits.clear()
    with pytest.MonkeyPatch.context() as patch, Draws():
        patch.setattr(torch, "Generator", Generator)
        patch.setattr(Tensor, "pin_memory", lambda tensor, device=None: _pin(tensor.clone()))
        patch.setattr(Tensor, "is_pinned", _is_pinned)
        patch.setattr(torch.accelerator, "synchronize", sim.synchronize)
        for choice in ("_choose_auto_accelerator", "_choose_gpu_accelerator_backend"):
            patch.setattr(_AcceleratorConnector, choice, staticmethod(lambda: "sim"))
        single = lambda own: SingleDeviceStrategy(SIM) if own._accelerator_flag == "sim" else _strategy(own)  # noqa: E731
        patch.setattr(_AcceleratorConnector, "_choose_strategy", single)
        try:
            yield sim
        finally:
            sim.plugged, sim.limit = False, None
