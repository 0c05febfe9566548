"""torch in the Python package: tensors of every kind become boxes of the parameters that they are parts of.

What a rank holds is compared with what torch itself says or gathers: nothing that the package computes is
believed. Several ranks are processes of their own, with gloo.
"""

import gc
import itertools
import math
import os
import socket
import traceback
import warnings

import ml_dtypes
import numpy
import pytest
import torch
import torch.distributed
import torch.multiprocessing
import weightsync
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from weightsync import sharding, tensors

import cluster


@pytest.fixture(scope="module")
def address():
    with cluster.Cluster() as here:
        yield here.nodes[0].socket


_count = iter(range(1_000_000))


@pytest.fixture
def model():
    return f"t{next(_count)}"


class Tiny(torch.nn.Module):
    """Tied weights, a bias, buffers of both kinds, and sizes that nothing divides."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(11, 6)
        self.layer = torch.nn.Linear(6, 7)
        self.back = torch.nn.Linear(7, 6, bias=False)
        self.head = torch.nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.tensor(3, dtype=torch.int64))
        self.register_buffer("cache", torch.zeros(4), persistent=False)

    def forward(self, ids):
        return self.head(self.back(torch.relu(self.layer(self.embed(ids)))))


def serve(model, address, module, **options):
    """A worker that fills `module`, and is there."""
    worker = weightsync.Worker(model, "r", module, address=address, **options)
    worker.wait_registered()
    return worker


def same_module(left, right):
    a, b = left.state_dict(), right.state_dict()
    assert a.keys() == b.keys()
    return all(torch.equal(a[name], b[name]) and a[name].dtype == b[name].dtype for name in a)


def test_a_module(address, model):
    torch.manual_seed(1)
    mine, live = Tiny(), Tiny()
    live.steps += 1
    with weightsync.Trainer(model, address=address) as trainer:
        trainer.register(mine)
        assert trainer.tied_names == {"head.weight": "embed.weight"}
        with serve(model, address, live):
            optimizer = torch.optim.SGD(mine.parameters(), lr=0.1)
            for _ in range(2):
                mine(torch.arange(5)).sum().backward()
                optimizer.step()
                mine.steps += 1
                trainer.publish().wait(60)
                assert same_module(mine, live)
            # The tie holds on the other side as well, for it is one tensor there.
            assert live.head.weight is live.embed.weight


def test_sharing_leaves_nothing_to_copy(address, model):
    mine, live = Tiny(), Tiny()
    weight, before = mine.layer.weight, mine.layer.weight.detach().clone()
    optimizer = torch.optim.Adam(mine.parameters(), lr=0.1)
    with weightsync.Trainer(model, address=address) as trainer:
        trainer.register(mine, share=True)
        assert mine.layer.weight is weight and torch.equal(weight, before)
        assert all(shard.target is None for shard in trainer._shards), "nothing is copied in this process"
        with serve(model, address, live):
            mine(torch.arange(5)).sum().backward()
            optimizer.step()
            assert not torch.equal(weight, before)
            trainer.publish().wait(60)
            assert same_module(mine, live)
            # A parameter that got another storage is found where it is now.
            mine.layer.weight.data = torch.full((7, 6), 2.0)
            trainer.publish().wait(60)
            assert same_module(mine, live)
    # The tensors outlive the trainer.
    del trainer
    assert float(mine.layer.weight.detach().sum()) == 84
    mine.embed.weight.data += 1


def test_the_files_that_torch_shares_are_read_where_they_lie(address, model):
    strategy = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        mine, live = {"w": torch.arange(1000.0).share_memory_()}, {"w": torch.zeros(1000)}
    finally:
        torch.multiprocessing.set_sharing_strategy(strategy)
    with weightsync.Trainer(model, address=address) as trainer, serve(model, address, live):
        trainer.register(mine)
        assert trainer._shards[0].target is None and not trainer._arenas
        mine["w"] += 1
        trainer.publish().wait(60)
        assert torch.equal(live["w"], torch.arange(1000.0) + 1)


def test_the_descriptors_that_torch_shares_are_read_where_they_lie(address, model):
    """Its other strategy, the default on Linux: files that have no name any more."""
    assert torch.multiprocessing.get_sharing_strategy() == "file_descriptor"
    mine = {"a": torch.arange(1000.0).share_memory_(), "b": torch.arange(77).share_memory_()}
    mine["c"] = mine["a"][100:900:2]
    live = {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in mine.items()}
    with weightsync.Trainer(model, address=address) as trainer, serve(model, address, live):
        trainer.register(mine)
        assert all(shard.target is None for shard in trainer._shards) and not trainer._arenas
        mine["a"] += 1
        trainer.publish().wait(60)
        assert torch.equal(live["a"], torch.arange(1000.0) + 1)
        assert torch.equal(live["b"], torch.arange(77)) and torch.equal(live["c"], live["a"][100:900:2])
        # Memory that is not used any more is not kept either.
        kept = len(os.listdir("/proc/self/fd"))
        mine = {name: torch.zeros_like(tensor).share_memory_() for name, tensor in mine.items()}
        gc.collect()
        trainer.register(mine)
        assert len(os.listdir("/proc/self/fd")) <= kept + 2
        trainer.publish().wait(60)
        assert not live["a"].any()


def test_strides_and_casts(address, model):
    base = torch.randn(12, 10)
    masters = {
        "transposed": base.t(),
        "sliced": base[::2, 1:9:3],
        "expanded": base[0].expand(4, 10),
        "whole": torch.randn(5, dtype=torch.float64),
        "ids": torch.arange(5),
        "flag": torch.tensor([True, False]),
    }
    live = {
        name: torch.zeros(t.shape, dtype=torch.bfloat16 if t.is_floating_point() else t.dtype)
        for name, t in masters.items()
    }
    # The engine's tensors may have strides, too.
    live["transposed"] = torch.zeros(12, 10, dtype=torch.bfloat16).t()
    with weightsync.Trainer(model, address=address, dtype=torch.bfloat16) as trainer, serve(model, address, live):
        trainer.register(masters)
        trainer.publish().wait(60)
    for name, tensor in masters.items():
        assert torch.equal(live[name], tensor.to(live[name].dtype)), name


def test_types_by_name(address, model):
    masters = {"a": torch.randn(6), "b": torch.randn(6), "c": torch.randn(6)}
    live = {"a": torch.zeros(6), "b": torch.zeros(6).to(torch.float8_e4m3fn), "c": torch.zeros(6).half()}
    with weightsync.Trainer(
        model, address=address, dtype={"b": "float8_e4m3fn", "c": torch.float16}
    ) as trainer, serve(model, address, live):
        trainer.register(masters)
        trainer.publish().wait(60)
    assert torch.equal(live["a"], masters["a"])
    assert torch.equal(live["b"].float(), masters["b"].to(torch.float8_e4m3fn).float())
    assert torch.equal(live["c"], masters["c"].half())
    with pytest.raises(ValueError) as error, weightsync.Trainer(
        model, address=address, dtype={"ids": "bf16"}
    ) as trainer:
        trainer.register({"ids": torch.arange(3)})
    assert error.value.reason == "DTYPE_MISMATCH"


def test_fp32_masters_of_a_bf16_model_are_cast_by_the_daemon(address, model):
    masters = torch.nn.Sequential(torch.nn.Linear(300, 40), torch.nn.Linear(40, 7))
    with torch.no_grad():
        # Ties, what rounds up into another exponent, the ends of the range, and what is no number.
        special = [0x3F808000, 0x3F818000, 0x3FFFFFFF, 0x7F7FFFFF, 0x00000001, 0x80008000, 0x7F800000, 0xFF800000]
        special += [0x7FC00000, 0x7F800001, 0x80000000]
        words = numpy.array(special, dtype=numpy.uint32).view(numpy.float32)
        masters[0].weight.view(-1)[: len(special)] = torch.from_numpy(words)
    live = {name: torch.zeros(t.shape, dtype=torch.bfloat16) for name, t in masters.state_dict().items()}
    with weightsync.Trainer(model, address=address, dtype=torch.bfloat16) as trainer, serve(model, address, live):
        # Nothing is copied here; and where memory is this process's alone, it is cast into what the daemon reads.
        for share in (True, False):
            if not share:
                masters = torch.nn.Sequential(torch.nn.Linear(300, 40), torch.nn.Linear(40, 7))
            trainer.register(masters, share=share)
            assert all((shard.target is None) == share for shard in trainer._shards)
            for _ in range(2):
                with torch.no_grad():
                    masters[1].weight.mul_(1.001)
                trainer.publish(verify_source=True).wait(60)
                for name, tensor in masters.state_dict().items():
                    want = tensor.bfloat16()
                    assert torch.equal(live[name].isnan(), want.isnan()), name
                    assert torch.equal(live[name].nan_to_num(7), want.nan_to_num(7)), name


def quantised(tensor):
    """A bf16 matrix as e4m3 and one scale for each block of 128 x 128, by ml_dtypes."""
    values = tensor.float().numpy()
    rows, columns = (-(-n // 128) for n in values.shape)
    found = numpy.zeros(values.shape, dtype=ml_dtypes.float8_e4m3fn)
    scales = numpy.zeros((rows, columns), dtype=numpy.float32)
    for row, column in itertools.product(range(rows), range(columns)):
        block = numpy.s_[row * 128 : row * 128 + 128, column * 128 : column * 128 + 128]
        scale = scales[row, column] = numpy.abs(values[block]).max() / numpy.float32(448)
        if scale:
            found[block] = (values[block] / scale).clip(-448, 448).astype(ml_dtypes.float8_e4m3fn)
    return found, scales


@pytest.mark.parametrize("share", [False, True])
def test_bf16_becomes_fp8_with_block_scales(address, model, share):
    torch.manual_seed(3)
    held = {"up.weight": torch.randn(300, 200).bfloat16(), "norm": torch.randn(77).bfloat16()}
    # A block of zeros, and one of very different sizes.
    held["up.weight"][128:256, :128] = 0
    held["up.weight"][256:, 128:] *= torch.logspace(-12, 12, 72)
    if share:
        held = {name: tensor.share_memory_() for name, tensor in held.items()}
    live = {
        "mlp.up.weight": torch.zeros(300, 200).to(torch.float8_e4m3fn),
        "mlp.up.weight_scale_inv": torch.zeros(3, 2),
        "norm": torch.zeros(77, dtype=torch.bfloat16),
    }
    with weightsync.Trainer(
        model, address=address, dtype={"mlp.up.weight": torch.float8_e4m3fn}
    ) as trainer, serve(model, address, live):
        trainer.register(held, names=[("^up", "mlp.up")])
        assert all((shard.target is None) == share for shard in trainer._shards)
        for _ in range(2):
            held["up.weight"] *= 1.5
            trainer.publish(verify_source=True).wait(60)
            values, scales = quantised(held["up.weight"])
            assert (live["mlp.up.weight"].view(torch.uint8).numpy() == values.view(numpy.uint8)).all()
            assert (live["mlp.up.weight_scale_inv"].numpy() == scales).all()
            assert torch.equal(live["norm"], held["norm"])
        # weight = fp8 x scale.
        spread = live["mlp.up.weight_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)[:300, :200]
        error = (live["mlp.up.weight"].float() * spread - held["up.weight"].float()).abs()
        assert (error <= held["up.weight"].float().abs() / 16 + spread * 2**-9).all()
        # Half a block has no scale.
        part = weightsync.Shard(held["up.weight"][:100], (0, 0), (300, 200))
        with pytest.raises(ValueError) as raised:
            trainer.register({"mlp.up.weight": part})
        assert raised.value.reason == "DTYPE_MISMATCH" and "blocks of 128 x 128" in str(raised.value)


def test_a_load_callback_gets_torch_tensors(address, model):
    taken = {}
    with weightsync.Trainer(model, address=address) as trainer:
        trainer.register({"w": torch.full((3, 2), 7, dtype=torch.bfloat16)})
        with weightsync.Worker(
            model, "r", load=lambda name, tensor: taken.update({name: tensor.clone()}), address=address
        ) as worker:
            worker.wait_registered()
            trainer.publish().wait(60)
    assert taken["w"].dtype == torch.bfloat16 and torch.equal(taken["w"], torch.full((3, 2), 7).bfloat16())


@pytest.mark.parametrize(
    "value, reason",
    [
        (torch.zeros(2, device="meta"), "TENSOR_UNKNOWN"),
        (torch.eye(3).to_sparse(), "TENSOR_UNKNOWN"),
        (torch.zeros(2, dtype=torch.complex64), "DTYPE_UNKNOWN"),
    ],
)
def test_what_cannot_be_moved(value, reason):
    with pytest.raises(ValueError) as error:
        tensors.parts_of("w", value)
    assert error.value.reason == reason


def says_it_is_on(device, values=None):
    """There is no GPU here: a part whose tensor only says that it is on one."""

    class OnDevice(torch.Tensor):
        @property
        def device(self):
            return torch.device(device, 1)

    values = torch.zeros(2) if values is None else values
    return tensors.Part("w", weightsync.DType.F32, (2,), None, None, values.as_subclass(OnDevice))


def test_other_devices_are_refused_by_name_unless_bounced(address, model):
    other = says_it_is_on("xpu")
    assert other.on_device() and not other.on_gpu and not other.in_place()
    with weightsync.Trainer(model, address=address) as trainer:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tensors, "all_parts", lambda _: [other])
            with pytest.raises(NotImplementedError, match="xpu:1") as error:
                trainer.register({"w": None})
            assert error.value.reason == "CUDA_MEMORY"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensors, "all_parts", lambda _: [other])
        with pytest.raises(NotImplementedError) as error:
            weightsync.Worker(model, "r", {"w": None}, address=address)
        assert error.value.reason == "CUDA_MEMORY"


@pytest.mark.parametrize("device", ["xpu", "cuda"])
def test_bounced_tensors_go_through_the_host(address, model, device):
    """Both sides read and fill them by torch's own copies: no address of theirs reaches the daemon."""
    mine, live = torch.tensor([1.0, 2.0]), torch.zeros(2)
    with pytest.MonkeyPatch.context() as patch, weightsync.Trainer(model, address=address, bounce=True) as trainer:
        patch.setattr(tensors, "all_parts", lambda _: [says_it_is_on(device, mine)])
        trainer.register({"w": None})
        (shard,) = trainer._shards
        assert shard.target is not None and len(trainer._arenas) == 1
        assert shard.address != mine.data_ptr()
        patch.setattr(tensors, "all_parts", lambda _: [says_it_is_on(device, live)])
        worker = weightsync.Worker(model, "r", {"w": None}, address=address, bounce=True)
        patch.setattr(tensors, "all_parts", lambda _: [says_it_is_on(device, mine)])
        with worker:
            worker.wait_registered()
            for value in (3.0, 4.0):
                mine.fill_(value)
                trainer.publish().wait(60)
                assert live.tolist() == [value, value]
        assert len(trainer._arenas) == 1


def test_one_copy_into_memory_that_is_used_again(address, model):
    """Tensors that the daemon cannot read where they lie are copied into one arena, the same at every publish."""
    mine, live = seeded(), seeded()
    with weightsync.Trainer(model, address=address) as trainer:
        trainer.register(mine)
        (arena,) = trainer._arenas
        addresses = [shard.address for shard in trainer._shards]
        with serve(model, address, live):
            for step in range(1, 5):
                with torch.no_grad():
                    mine.layer.weight.fill_(step)
                # Temporaries of the same layout at every other publish.
                copies = {name: tensor.clone() for name, tensor in mine.state_dict().items()}
                del copies["head.weight"]
                trainer.publish(tensors=copies if step % 2 else None).wait(60)
                assert same_module(mine, live)
        trainer.register(mine)
        assert trainer._arenas == [arena] and [shard.address for shard in trainer._shards] == addresses


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_cuda_tensors_are_looked_up_on_a_gpu(address, model, dtype):
    """Which this machine does not have, or not there: the library says so, and reads nothing. With a cast as well:
    it is made on the GPU."""
    part = says_it_is_on("cuda")
    assert part.on_gpu and part.in_place()
    reasons = ("CUDA_RUNTIME_MISSING", "CUDA_NOT_BUILT", "DRIVER_TOO_OLD", "NO_DEVICE", "NOT_DEVICE_MEMORY")
    with weightsync.Trainer(model, address=address, dtype=dtype) as trainer:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tensors, "all_parts", lambda _: [part])
            with pytest.raises(weightsync.WeightsyncError, match="w: ") as error:
                trainer.register({"w": None})
            assert error.value.reason in reasons
            patch.setattr(tensors, "all_parts", lambda _: [says_it_is_on("cuda")])
            with pytest.raises(weightsync.WeightsyncError, match="w: ") as error:
                weightsync.Worker(model, "r", {"w": None}, address=address)
            assert error.value.reason in reasons


# ---- Where a shard lies ----


def mesh_coordinates(mesh):
    return list(itertools.product(*(range(n) for n in mesh)))


def cover(shape, boxes_of_ranks, copies):
    """Every element is in exactly `copies` boxes."""
    seen = numpy.zeros(shape, dtype=int)
    for boxes in boxes_of_ranks:
        for box in boxes:
            seen[tuple(slice(o, o + n) for o, n in zip(box.offset, box.extent))] += 1
    assert (seen == copies).all()


@pytest.mark.parametrize("length, world", [(5, 4), (4, 4), (1, 3), (16, 3), (7, 1), (9, 5)])
def test_chunks_are_those_of_torch(length, world):
    chunks = list(torch.arange(length).chunk(world)) + [torch.empty(0)] * world
    for rank in range(world):
        begin, count = sharding.chunk(length, world, rank)
        assert chunks[rank].tolist() == list(range(begin, begin + count))


S, R = (lambda d: sharding.Placement("shard", d)), sharding.Placement("replicate")


@pytest.mark.parametrize(
    "shape, mesh, placements, copies",
    [
        ((5, 3), (4,), (S(0),), 1),
        ((5, 3), (4,), (R,), 4),
        ((5, 7), (2, 3), (S(0), S(1)), 1),
        ((5, 7), (2, 3), (R, S(-1)), 2),
        ((13,), (2, 3), (S(0), S(0)), 1),
        ((12, 4), (2, 3), (sharding.Placement("strided", 0, 3), S(0)), 1),
        ((13, 4), (2, 3), (sharding.Placement("strided", 0, 3), S(0)), 1),
        ((24,), (2, 3, 2), (sharding.Placement("strided", 0, 6), S(0), S(0)), 1),
        ((24,), (2, 3), (sharding.Placement("strided", 0, 4), R), 3),
        ((), (3,), (R,), 3),
    ],
)
def test_boxes_cover_the_tensor(shape, mesh, placements, copies):
    ranks = [sharding.placement_boxes(shape, mesh, at, placements) for at in mesh_coordinates(mesh)]
    cover(shape, ranks, copies)
    assert sharding.placement_boxes(shape, mesh, None, placements) == []


def test_fsdp_over_tp_is_cut_by_tp_first():
    """Two of each, eight rows: TP rank 1 has rows 4 to 7, of which FSDP rank 1 has 6 and 7."""
    placements = (sharding.Placement("strided", 0, 2), S(0))
    (box,) = sharding.placement_boxes((8,), (2, 2), (1, 1), placements)
    assert (box.offset, box.extent) == ((6,), (2,))
    (box,) = sharding.placement_boxes((8,), (2, 2), (1, 0), placements)
    assert (box.offset, box.extent) == ((2,), (2,))


@pytest.mark.parametrize("shape", [(4, 3, 5), (7,), (2, 2, 2, 2), (1, 6), ()])
def test_flat_runs_become_boxes(shape):
    size = math.prod(shape)
    flat = numpy.arange(size).reshape(shape)
    for begin in range(size):
        for length in range(1, size - begin + 1):
            run = numpy.arange(begin, begin + length)
            seen = []
            for offset, extent, position in sharding.flat_boxes(shape, begin, length):
                box = flat[tuple(slice(o, o + n) for o, n in zip(offset, extent))].ravel()
                assert run[position : position + box.size].tolist() == box.tolist()
                seen += box.tolist()
            assert sorted(seen) == run.tolist()
    assert sharding.flat_boxes(shape, 0, 0) == []


# ---- Ranks of torch.distributed ----


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


WORLD = 4


def _serve_rank(rank, port, work, answers):
    """A rank that does what it is given until it is given None."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=WORLD)
    while (given := work.get()) is not None:
        function, arguments = given
        try:
            function(rank, WORLD, *arguments)
            answers.put((rank, None))
        except BaseException:  # noqa: BLE001  the test says it
            answers.put((rank, traceback.format_exc()))
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def on_ranks():
    """Calls a function in four processes that have a process group: importing torch is what takes time."""
    context = torch.multiprocessing.get_context("spawn")
    answers, port = context.Queue(), free_port()
    work = [context.Queue() for _ in range(WORLD)]
    processes = [
        context.Process(target=_serve_rank, args=(rank, port, work[rank], answers), daemon=True)
        for rank in range(WORLD)
    ]
    for process in processes:
        process.start()

    def call(function, *arguments):
        for queue in work:
            queue.put((function, arguments))
        for _ in range(WORLD):
            rank, problem = answers.get(timeout=120)
            assert problem is None, f"rank {rank}:\n{problem}"

    yield call
    for queue in work:
        queue.put(None)
    for process in processes:
        process.join(30)
        process.kill()


def check_against_whole(name, held, whole):
    """Each part is the box of the whole tensor that it says, for every rank; returns elements held."""
    elements = 0
    for part in held:
        assert part.shape == tuple(whole.shape), name
        offset = part.offset or (0,) * whole.dim()
        box = whole[tuple(slice(o, o + n) for o, n in zip(offset, part.box_extent))]
        assert torch.equal(part.array, box), (name, offset)
        elements += part.array.numel()
    total = torch.tensor(elements)
    torch.distributed.all_reduce(total)
    return int(total)


def _dtensors(rank, world):
    flat = init_device_mesh("cpu", (world,))
    grid = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "tp"))
    for shape, mesh, placements, copies in [
        ((9, 5), flat, [Shard(0)], 1),
        ((3, 5), flat, [Shard(0)], 1),  # one rank has nothing
        ((9, 5), flat, [Shard(1)], 1),
        ((9, 5), flat, [Replicate()], world),
        ((9, 5), grid, [Shard(0), Shard(1)], 1),
        ((9, 5), grid, [Shard(1), Shard(1)], 1),
        ((8, 4), grid, [Replicate(), Shard(-1)], 2),
        ((), flat, [Replicate()], world),
    ]:
        whole = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)
        held = tensors.parts_of("w", distribute_tensor(whole, mesh, placements))
        assert check_against_whole("w", held, whole) == copies * whole.numel(), (shape, placements)
    partial = DTensor.from_local(torch.ones(3), flat, [Partial()])
    with pytest.raises(NotImplementedError) as error:
        tensors.parts_of("w", partial)
    assert error.value.reason == "PARTIAL_PLACEMENT" and "w:" in str(error.value)


def test_dtensors(on_ranks):
    on_ranks(_dtensors)


def seeded():
    torch.manual_seed(5)
    return Tiny()


def _fsdp2(rank, world, address, model):
    whole = seeded()
    module = seeded()
    module.head = torch.nn.Linear(6, 11, bias=False)  # FSDP shards a tied weight once; it stays out here
    whole.head = torch.nn.Linear(6, 11, bias=False)
    module.head.load_state_dict(whole.head.state_dict())
    mesh = init_device_mesh("cpu", (world,))
    fully_shard(module.layer, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    fully_shard(module, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    full = whole.state_dict()
    by_name = {}
    for part in tensors.all_parts(module):
        by_name.setdefault(part.name, []).append(part)
    for name, tensor in full.items():
        copies = world if name == "steps" else 1
        assert check_against_whole(name, by_name.get(name, []), tensor) == copies * tensor.numel(), name

    # The same over a cluster: every rank gives what it holds, nothing is gathered.
    with weightsync.Trainer(model, rank, world, address=address, dtype=torch.bfloat16) as trainer:
        trainer.register(module)
        if rank == 0:
            live = {
                name: torch.zeros(t.shape, dtype=torch.bfloat16 if t.is_floating_point() else t.dtype)
                for name, t in full.items()
            }
            worker = serve(model, address, live)
        torch.distributed.barrier()
        result = trainer.publish(step=1).wait(60)
        assert result.version == 1
        torch.distributed.barrier()
        if rank == 0:
            for name, tensor in full.items():
                assert torch.equal(live[name], tensor.to(live[name].dtype)), name
            worker.close()


def test_fsdp2(on_ranks, address, model):
    on_ranks(_fsdp2, address, model)


def _fsdp_over_tp(rank, world):
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    # Also what neither dimension of the mesh divides: torch shards it, some ranks get less or nothing.
    for rows, columns in ((8, 12), (12, 8), (16, 4), (9, 10), (10, 6), (5, 7)):
        torch.manual_seed(rows)
        make = lambda: torch.nn.Sequential(torch.nn.Linear(columns, rows), torch.nn.Linear(rows, columns))  # noqa: E731
        torch.manual_seed(rows)
        whole = make()
        torch.manual_seed(rows)
        module = make()
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(module, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        fully_shard(module, mesh=mesh["dp"])
        placements = {name: p.placements for name, p in module.named_parameters()}
        assert "_StridedShard" in str(placements["0.weight"]), placements
        by_name = {}
        for part in tensors.all_parts(module):
            by_name.setdefault(part.name, []).append(part)
        for name, tensor in whole.state_dict().items():
            # What tensor parallelism leaves whole, each of its ranks has.
            copies = world // 2 if name == "1.bias" else 1
            assert check_against_whole(name, by_name.get(name, []), tensor) == copies * tensor.numel(), name


def test_fsdp_over_tensor_parallelism(on_ranks):
    on_ranks(_fsdp_over_tp)


def _fsdp1(rank, world, address, model):
    """A module that is wrapped, within one that is and within one that is not, and one of which a part is ignored;
    with parameters that are seen and with flat ones alone.
    """
    kinds = ("root", "both", "inner", "ignored")
    for kind, use_orig_params in itertools.product(kinds, (True, False)):
        whole, module = seeded(), seeded()
        options = dict(device_id=torch.device("cpu"), use_orig_params=use_orig_params)
        # What is in no flat parameter is whole on every rank.
        replicated = {"steps"}
        if kind in ("both", "inner"):
            module.layer = FullyShardedDataParallel(module.layer, **options)
        if kind == "inner":
            wrapped = module
            replicated |= {"embed.weight", "back.weight"}
        elif kind == "ignored":
            wrapped = FullyShardedDataParallel(module, ignored_modules=[module.back], **options)
            replicated |= {"back.weight"}
        else:
            wrapped = FullyShardedDataParallel(module, **options)
        by_name = {}
        for part in tensors.all_parts(wrapped):
            by_name.setdefault(part.name, []).append(part)
        full = whole.state_dict()
        del full["head.weight"]  # tied: it is there once
        assert by_name.keys() <= full.keys()
        for name, tensor in full.items():
            copies = world if name in replicated else 1
            assert check_against_whole(name, by_name.get(name, []), tensor) == copies * tensor.numel(), name

        # And over a cluster: every rank gives its stretch of the flat parameters.
        name = f"{model}-{kind}-{int(use_orig_params)}"
        with weightsync.Trainer(name, rank, world, address=address) as trainer:
            trainer.register(wrapped)
            if rank == 0:
                live = {key: torch.zeros_like(tensor) for key, tensor in full.items()}
                worker = serve(name, address, live)
            torch.distributed.barrier()
            assert trainer.publish(step=1).wait(60).version == 1
            torch.distributed.barrier()
            if rank == 0:
                for key, tensor in full.items():
                    assert torch.equal(live[key], tensor), key
                worker.close()


def test_fsdp1(on_ranks, address, model):
    on_ranks(_fsdp1, address, model)
