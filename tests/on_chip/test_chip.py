"""The emulator itself: operators compared with the CPU, shared memory, CUDA's errors, waits."""

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import chip
import numpy as np
import pytest
import torch
import torch.nn.functional as F

C = chip.NAME


def tree(f: Callable[[torch.Tensor], Any], x: Any) -> Any:
    """Apply ``f`` to the tensors of nested tuples and lists."""
    if isinstance(x, torch.Tensor):
        return f(x)
    if isinstance(x, list | tuple):
        return [tree(f, y) for y in x]
    return x


def operators() -> dict[str, tuple[Any, ...]]:
    """Functions by name, each with its arguments."""
    g = torch.Generator().manual_seed(0)
    a, b = torch.randn(6, 5, generator=g), torch.randn(6, 5, generator=g)
    v, i = torch.randn(6, generator=g), torch.tensor([3, 0, 5, 1])
    k, m = torch.randint(0, 4, (6, 5), generator=g), a > 0
    img = torch.randn(2, 3, 8, 8, generator=g)
    return {
        "add": (lambda a, b: a + 2 * b, a, b),
        "type promotion": (lambda a, k: k + 1.5 * a.double(), a, k),
        "int div": (lambda k: (k // 2, k / 2, k % 3), k),
        "pow": (lambda a: (a**2, 2.0**a, a.abs() ** 0.5), a),
        "compare": (lambda a, b: (a > b, a <= 0, a.eq(b), a.isfinite(), a.isnan()), a, b),
        "logic": (lambda m: (~m, m & m, m | ~m, m ^ m), m),
        "where": (
            lambda a, b, m: (torch.where(m, a, b), torch.where(m, a, 0.0), torch.where(m, 1, 2)),
            a,
            b,
            m,
        ),
        "clamp": (lambda a: (a.clamp(-1, 1), a.clamp_min(0)), a),
        "sum": (lambda a: (a.sum(), a.sum(0), a.mean(1, keepdim=True), a.var(0), a.std()), a),
        "max": (lambda a: (a.max(), *a.max(0), a.amax(1), a.argmin(1)), a),
        "any": (lambda m: (m.any(), m.all(0), m.any(1)), m),
        "cumsum": (lambda a, k: (a.cumsum(0), k.cumsum(0), *a.cummax(0), a.flip(0).logcumsumexp(0)), a, k),
        "sort": (lambda a, k: (*a.sort(0), k.argsort(dim=0, stable=True), *a.topk(2, 0)), a, k),
        "unique": (lambda k: torch.unique(k, return_inverse=True, return_counts=True), k),
        "unique_consecutive": (lambda k: torch.unique_consecutive(k.flatten(), return_counts=True), k),
        "nonzero": (lambda m: (m.nonzero(), *m.nonzero(as_tuple=True)), m),
        "mask": (lambda a, m: (a[m], a.masked_select(m), a.masked_fill(m, 7.0)), a, m),
        "index": (lambda a, i: (a[i], a[i, i % 5], a[:, 1:4:2], a[..., None, 0], a[-1]), a, i),
        "index_put": (lambda a, i, v: _put(a, i, v), a, i, v),
        "index_add": (lambda a, i, b: a.index_add(0, i, b[:4]), a, i, b),
        "index_copy": (lambda a, i, b: a.index_copy(0, i, b[:4]), a, i, b),
        "gather": (lambda a, k: a.gather(1, k), a, k),
        "scatter": (
            lambda a, k: (
                torch.zeros_like(a).scatter(1, k[:, :1], 1.0),
                torch.zeros_like(a).scatter_add(1, k, a),
            ),
            a,
            k,
        ),
        "scatter_reduce": (lambda a, k: torch.zeros_like(a).scatter_reduce(1, k, a, "amax"), a, k),
        "take": (
            lambda a, i: (a.take(i), a.index_select(1, i[:1]), a[:4].take_along_dim(i[:, None] % 5, 1)),
            a,
            i,
        ),
        "searchsorted": (lambda v, a: torch.searchsorted(v.sort()[0], a), v, a),
        "bucketize": (lambda v, a: torch.bucketize(a, v.sort()[0]), v, a),
        "bincount": (lambda k: k.flatten().bincount(minlength=7), k),
        "repeat": (
            lambda a, i: (
                a.repeat(2, 1),
                i.repeat_interleave(i),
                i.repeat_interleave(2),
                a.expand(3, 6, 5),
                a.tile(2),
            ),
            a,
            i,
        ),
        "cat": (
            lambda a, b: (
                torch.cat([a, b]),
                torch.stack([a, b], 1),
                *a.split([2, 4]),
                *a.chunk(2),
                *a.unbind(1),
            ),
            a,
            b,
        ),
        "shape": (
            lambda a: (
                a.T,
                a.reshape(3, 10),
                a.view(-1),
                a.unfold(0, 2, 1),
                a.flip(0),
                a.roll(1, 0),
                a.movedim(0, 1),
                a.diagonal(),
            ),
            a,
        ),
        "matmul": (
            lambda a, b: (
                a @ b.T,
                torch.einsum("ij,kj->ik", a, b),
                torch.addmm(a @ b.T, a, b.T),
                torch.bmm(a[None], b.T[None]),
                a @ b[0],
            ),
            a,
            b,
        ),
        "activations": (
            lambda a: (
                a.tanh(),
                a.sigmoid(),
                F.relu(a),
                F.softplus(a),
                F.gelu(a),
                F.silu(a),
                F.elu(a),
                a.exp(),
                a.log1p(),
                a.erf(),
            ),
            a,
        ),
        "softmax": (lambda a: (a.softmax(1), a.log_softmax(1), a.logsumexp(1)), a),
        "losses": (
            lambda a, b, i: (
                F.mse_loss(a, b),
                F.smooth_l1_loss(a, b),
                F.huber_loss(a, b),
                F.cross_entropy(a[:4], i % 5),
                F.binary_cross_entropy_with_logits(a, b.sigmoid()),
            ),
            a,
            b,
            i,
        ),
        "norms": (
            lambda a: (
                F.layer_norm(a, (5,)),
                a.norm(),
                torch.linalg.vector_norm(a, dim=1),
                F.normalize(a),
                F.batch_norm(a, None, None, training=True),
            ),
            a,
        ),
        "conv": (
            lambda x: (
                F.conv2d(x, x[:, :, :3, :3]),
                F.max_pool2d(x, 2),
                F.avg_pool2d(x, 2),
                F.adaptive_avg_pool2d(x, 1),
                F.interpolate(x, scale_factor=2),
                F.pad(x, (1, 1)),
            ),
            img,
        ),
        "embedding": (lambda a, k: (F.embedding(k, a), F.one_hot(k, 4)), a, k),
        "cast": (
            lambda a: (a.half(), a.bfloat16(), a.double(), a.long(), a.bool(), a.to(torch.uint8)),
            a.abs(),
        ),
        "bits": (lambda k: (k << 1, k >> 1, k & 1, k.view(torch.int32), k | 8), k),
        "complex": (
            lambda a: (
                torch.view_as_real(
                    torch.view_as_complex(a[:, :4].reshape(6, 2, 2).contiguous()).conj().resolve_conj()
                ),
            ),
            a,
        ),
        "lerp": (lambda a, b: (a.lerp(b, 0.3), torch.addcmul(a, a, b), torch.addcdiv(a, a, b.exp())), a, b),
        "foreach": (
            lambda a, b: (
                torch._foreach_add([a, b], 1.0),
                torch._foreach_mul([a, b], [b, a]),
                torch._foreach_norm([a, b]),
            ),
            a,
            b,
        ),
        "in place": (lambda a, b: _in_place(a, b), a, b),
        "out=": (lambda a, b: _out(a, b), a, b),
        "linalg": (
            lambda a: (
                torch.linalg.solve(a[:5] @ a[:5].T + 9 * torch.eye(5, device=a.device), a[:5]),
                torch.linalg.det(a[:5]),
                torch.outer(a[0], a[1]),
                torch.cdist(a, a),
            ),
            a,
        ),
        "isin": (lambda k, i: torch.isin(k, i), k, i),
        "quantile": (lambda a: (a.quantile(0.3, 0), a.median(), a.nanmean()), a),
        "masked_scatter": (lambda a, m: a.masked_scatter(m, a.flip(0)), a, m),
        "trapezoid": (
            lambda a: (
                torch.diff(a, dim=0),
                torch.trapezoid(a),
                a.prod(1),
                a.tril(),
                torch.meshgrid(a[0], a[1], indexing="ij"),
            ),
            a,
        ),
        "nan_to_num": (
            lambda a: ((a / 0).nan_to_num(1.0), a.sign(), a.round(), a.floor(), a.frac(), a.trunc()),
            a,
        ),
        "view dtype": (lambda a: (a.view(torch.int32), a.view(torch.uint8)), a),
        "0-dim scalar": (
            lambda a: (
                a + torch.tensor(2.0),
                torch.tensor(2.0) * a,
                torch.where(a > 0, a, torch.tensor(1.0)),
                a.masked_fill(a > 0, torch.tensor(3.0)),
            ),
            a,
        ),
        "cpu index": (
            lambda a: (a[torch.tensor([0, 2])], a[torch.tensor([True, False, True, False, False, True])]),
            a,
        ),
        "resize": (lambda a: _resize(a), a),
        "as_strided": (lambda a: (a.as_strided((2, 3), (1, 2), 1), a.new_zeros(3), a.new_full((2,), 4.0)), a),
        "dropout off": (lambda a: F.dropout(a, 0.5, training=False), a),
        "multi-head": (lambda a: F.scaled_dot_product_attention(a[None], a[None], a[None]), a),
    }


def _put(a, i, v):
    x = a.clone()
    x[i] = v[:4, None]
    x[0, 1:] = 5
    x[x > 1] = -1.0
    x[i, 0] += 1
    x.index_put_((i, i % 5), v[:4], accumulate=True)
    x[torch.tensor([1, 2])] = 8.0
    return x


def _in_place(a, b):
    x = a.clone()
    row, column = x[2], x[:, 1]
    row.add_(1), column.mul_(2), x.view(-1)[3:9].zero_(), x.T[0].copy_(b[:, 0]), x.clamp_(-2, 2)
    y = x[1:]
    y += 1
    y[y < 0] = 0
    return x, row, column, y


def _out(a, b):
    x, y = torch.empty_like(a), torch.empty(0, device=a.device)
    (
        torch.add(a, b, out=x),
        torch.mul(a, b, out=y),
        torch.minimum(a, b, out=x[:]),
        torch.cat([a, b], out=(z := torch.empty(12, 5, device=a.device))),
    )
    return x, y, z


def _resize(a):
    x = a.clone()
    view = x[0]
    x.resize_(3, 5)
    view.fill_(3)
    return x, view


OPERATORS = operators()


@pytest.mark.parametrize("name", list(OPERATORS))
def test_an_operator(name: str) -> None:
    call, *given = OPERATORS[name]
    expected = call(*[x.clone() for x in given])
    found = call(*[x.to(C) for x in given])
    devices, leaves = [], []
    tree(lambda x: devices.append(x.device.type), found), tree(lambda x: leaves.append(x), expected)
    assert set(devices) == {C}, (name, devices)
    low = []
    tree(lambda x: low.append((x.stride(), x.cpu())), found)
    for (stride, x), y in zip(low, leaves, strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape and stride == y.stride(), (name, stride, y.stride())
        close = {"rtol": 1e-5, "atol": 1e-6} if name in ("norms", "multi-head") else {"rtol": 0, "atol": 0}
        torch.testing.assert_close(x, y, equal_nan=True, **close)


def test_factories() -> None:
    for call in (
        lambda d: torch.zeros(2, 3, device=d),
        lambda d: torch.ones(2, device=d, dtype=torch.long),
        lambda d: torch.full((2,), 3, device=d),
        lambda d: torch.arange(2, 9, 3, device=d),
        lambda d: torch.eye(3, device=d),
        lambda d: torch.linspace(0, 1, 5, device=d),
        lambda d: torch.tensor([[1, 2]], device=d),
        lambda d: torch.as_tensor(np.arange(3), device=d),
        lambda d: torch.full((), True, device=d),
        lambda d: torch.rand(4, device=d, generator=torch.Generator(d).manual_seed(3)),
        lambda d: torch.randn(4, device=d, generator=torch.Generator(d).manual_seed(3)),
        lambda d: torch.randint(9, (4,), device=d, generator=torch.Generator(d).manual_seed(3)),
        lambda d: torch.randperm(9, device=d, generator=torch.Generator(d).manual_seed(3)),
        lambda d: torch.bernoulli(
            torch.full((9,), 0.5, device=d), generator=torch.Generator(d).manual_seed(3)
        ),
        lambda d: torch.multinomial(
            torch.ones(3, 4, device=d), 2, generator=torch.Generator(d).manual_seed(3)
        ),
        lambda d: torch.empty(3, device=d).exponential_(generator=torch.Generator(d).manual_seed(3)),
        lambda d: torch.empty(3, device=d).normal_(generator=torch.Generator(d).manual_seed(3)),
        lambda d: torch.normal(
            torch.zeros(3, device=d), torch.ones(3, device=d), generator=torch.Generator(d).manual_seed(3)
        ),
    ):
        x, y = call("cpu"), call(C)
        assert y.device == torch.device(C, 0) and x.dtype == y.dtype and torch.equal(x, y.cpu()), call
    with torch.device(C):
        assert torch.zeros(2).device.type == torch.rand_like(torch.ones(3)).device.type == C


def test_gradients() -> None:
    def run(d):
        torch.manual_seed(0)
        net = torch.nn.Sequential(
            torch.nn.Conv2d(1, 2, 3),
            torch.nn.Flatten(),
            torch.nn.Linear(72, 8),
            torch.nn.LayerNorm(8),
            torch.nn.Tanh(),
            torch.nn.Linear(8, 3),
        )
        first = net[0].weight
        net.to(d)
        assert net[0].weight is first  # as on CUDA
        x, label = torch.randn(7, 1, 8, 8).to(d), (torch.arange(7) % 3).to(d)
        optimizers = [
            torch.optim.Adam(net.parameters(), 1e-2),
            torch.optim.SGD(net.parameters(), 1e-2, momentum=0.9),
            torch.optim.RMSprop(net.parameters()),
            torch.optim.AdamW(net.parameters(), foreach=False),
        ]
        for optimizer in optimizers:
            for _ in range(2):
                optimizer.zero_grad()
                F.cross_entropy(net(x), label).backward()
                torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
                optimizer.step()
        return [p.detach().cpu() for p in net.parameters()]

    for x, y in zip(run("cpu"), run(C), strict=True):
        torch.testing.assert_close(y, x, rtol=1e-3, atol=1e-4)
    for kind in (torch.nn.GRU, torch.nn.LSTM):
        for packed in (False, True):
            grads = []
            for d in ("cpu", C):
                torch.manual_seed(0)
                net, x = kind(4, 5, num_layers=2), torch.randn(6, 3, 4)
                net.to(d)
                x = x.to(d).requires_grad_()
                given = torch.nn.utils.rnn.pack_padded_sequence(x, torch.tensor([6, 4, 1])) if packed else x
                out = net(given)[0]
                (out.data if packed else out).square().sum().backward()
                grads.append([x.grad.cpu(), *(p.grad.cpu() for p in net.parameters())])
            torch.testing.assert_close(grads[1], grads[0], rtol=1e-5, atol=1e-6)
    f = torch.func.vmap(torch.func.grad(lambda w, x: (w * x).sum().tanh()), (None, 0))
    w, x = torch.randn(4), torch.randn(3, 4)
    torch.testing.assert_close(f(w.to(C), x.to(C)).cpu(), f(w, x))


def errors() -> list[tuple[Callable[[], Any], str]]:
    """Calls that CUDA refuses, with a part of the message."""
    x, y, i = torch.ones(3, 3, device=C), torch.ones(3, 3), torch.tensor([0, 1])
    same = "same device"
    return [
        (lambda: x + y, same),
        (lambda: x @ y, same),
        (lambda: x.mul_(y), same),
        (lambda: y.add_(x), same),
        (lambda: torch.where(y > 0, x, x), same),
        (lambda: torch.cat([x, y]), same),
        (lambda: torch.stack([x, y]), same),
        (lambda: x.gather(0, i[None]), same),
        (lambda: x.scatter(0, i[None], 1.0), same),
        (lambda: x.index_select(0, i), same),
        (lambda: x.index_add_(0, i, x[:2]), same),
        (lambda: torch.searchsorted(x, y), same),
        (lambda: y[i.to(C)], "indices should be"),
        (lambda: y.__setitem__(i.to(C), 1.0), "device"),
        (lambda: x.__setitem__(i, y[:2]), same),
        (lambda: F.mse_loss(x, y), same),
        (lambda: F.linear(x, y), same),
        (lambda: torch.add(x, x, out=y), ""),
        (lambda: F.embedding(i, x), same),
        (lambda: x.masked_fill(y > 0, 1.0), same),
        (lambda: torch.mm(x, torch.tensor(2.0)), ""),
        (lambda: F.layer_norm(x, (3,), y[0]), same),
        (lambda: F.cross_entropy(x, i[[0, 1, 1]]), same),
        (lambda: torch.lerp(x, y, 0.5), same),
        (lambda: x.numpy(), "can't convert"),
        (lambda: np.asarray(x), "can't convert"),
        (lambda: np.from_dlpack(x), "DLPack"),
        (lambda: torch.from_dlpack(x).numpy(), ""),
        (lambda: memoryview(x), ""),
        (lambda: x.pin_memory(), "pin"),
        (lambda: torch.empty(2, device=C, pin_memory=True), "pinned"),
        (lambda: x.long() @ x.long(), "not implemented"),
        (lambda: torch.rand(3, device=C, generator=torch.Generator()), "generator"),
        (lambda: torch.rand(3, generator=torch.Generator(C)), "generator"),
        (lambda: torch.randperm(3, generator=torch.Generator(C)), "generator"),
        (lambda: torch.nn.Linear(3, 3)(x), same),
        (lambda: torch.nn.GRU(3, 3).to(C)(y), ""),
        (lambda: torch.tensor([1]).to("chip:0") + i[:1], same),
        (
            lambda: torch.nn.utils.rnn.pack_padded_sequence(x[:, :, None], torch.tensor([3, 2, 1], device=C)),
            "CPU",
        ),
        (lambda: torch.multinomial(x, 9), ""),
    ]


ERRORS = errors()


@pytest.mark.parametrize("number", range(len(ERRORS)))
def test_an_error(number: int) -> None:
    call, text = ERRORS[number]
    with pytest.raises((RuntimeError, TypeError, BufferError, ValueError)) as caught:
        call()
    assert text in str(caught.value)


def test_waits() -> None:
    x, m = torch.arange(6.0, device=C), torch.arange(6, device=C) > 2
    waiting = {
        "item": lambda: x[0].item(),
        "bool": lambda: bool(m.any()),
        "int": lambda: int(x.sum()),
        "tolist": lambda: x.tolist(),
        "nonzero": lambda: m.nonzero(),
        "where(m)": lambda: torch.where(m),
        "x[m]": lambda: x[m],
        "masked_select": lambda: x.masked_select(m),
        "unique": lambda: x.unique(),
        "bincount": lambda: m.long().bincount(),
        "repeats": lambda: x.repeat_interleave(m.long()),
        "cpu": lambda: x.cpu(),
        "to": lambda: x.to("cpu"),
        "x[m]=y": lambda: x.__setitem__(m, x[3:] + 0),
        "x[m]=0-dim": lambda: x.__setitem__(m, x[0]),
        "equal": lambda: x.equal(x),
        "copy_": lambda: torch.empty(6).copy_(x),
        "normal": lambda: torch.normal(x, x),
        "repr": lambda: repr(x),
        "if": lambda: 1 if x[0] else 0,
        "iter": lambda: [float(y) for y in x],
    }
    free = {
        "x[m]=0": lambda: x.__setitem__(m, 0.0),
        "masked_fill": lambda: x.masked_fill(m, 1.0),
        "where": lambda: torch.where(m, x, 0.0),
        "sum": lambda: x.sum(),
        "index": lambda: x[torch.zeros(2, dtype=torch.long, device=C)],
        "randperm": lambda: torch.randperm(9, device=C),
        "multinomial": lambda: torch.multinomial(x + 1, 2),
        "repeats, size": lambda: x.repeat_interleave(m.long(), output_size=3),
        "full": lambda: torch.full((2,), 1.0, device=C),
        "Categorical": lambda: torch.distributions.Categorical(logits=x, validate_args=False).sample(),
        "one_hot": lambda: F.one_hot(m.long(), 2),
        "iter": lambda: list(x),
        "non_blocking": lambda: x.to("cpu", non_blocking=True),
        "upload": lambda: torch.ones(3).to(C),
    }
    for name, call in waiting.items():
        with chip.watch() as seen:
            call()
        assert seen.waits(uploads=False), name
        try:
            with chip.watch("error"):
                call()
        except RuntimeError as error:
            assert "synchronizing" in str(error)
        else:
            raise AssertionError(name)
    for call in free.values():
        with chip.watch("error"):
            call()
    try:
        with chip.watch("strict"):
            torch.ones(3).to(C)
    except RuntimeError:
        pass
    else:
        raise AssertionError("strict")
    with chip.watch("error"):
        x[:0].to("cpu")  # a copy of nothing does not wait
    late = (x + 1).to("cpu", non_blocking=True)
    assert late.isnan().all()  # it has not arrived
    torch.chip.synchronize()
    assert torch.equal(late, (x + 1).cpu())


def test_memory() -> None:
    x = torch.zeros(4, 4, device=C)
    view = x[1:3]
    assert (
        view.untyped_storage().data_ptr()
        == x.untyped_storage().data_ptr()
        != torch.zeros(4, device=C).untyped_storage().data_ptr()
    )
    assert (
        view.data_ptr() - x.data_ptr() == 16 and x.untyped_storage().nbytes() == 64 and view.is_set_to(x[1:3])
    )
    assert (
        type(x) is torch.Tensor
        and type(x[0]) is torch.Tensor
        and x.is_contiguous()
        and not x.is_cpu
        and not x.is_cuda
    )
    y = copy.deepcopy(x)
    y.fill_(1)
    assert float(x.sum()) == 0 and float(y.sum()) == 16
    z = x.detach()
    z.fill_(2)
    assert float(x.sum()) == 32
    memory = weakref.ref(x.untyped_storage()._host)
    del x, view, z
    gc.collect()
    assert memory() is None  # freed
    a = torch.ones(3, requires_grad=True, device=C)
    b = a.exp()
    try:
        (b * 2).sum().backward() if b.mul_(2) is None else b.sum().backward()
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
