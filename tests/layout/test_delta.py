import gymnasium as gym
import pytest
import torch
from forms import examples
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from flatroll.layout import NextObservationDelta, check_delta, decode_delta, encode_delta

INTEGERS = [
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers_come_back_exactly(dtype):
    low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    values = [low, low + 1, 0, 1, 7, high - 1, high]
    obs = torch.tensor([v for v in values for _ in values], dtype=dtype)
    following = torch.tensor(values * len(values), dtype=dtype)
    delta = encode_delta(obs, following)
    assert delta.dtype == dtype
    assert decode_delta(obs, delta).tolist() == following.tolist()
    check_delta(delta, obs, following, "pixels")


def test_bool_comes_back_exactly():
    obs, following = torch.tensor([False, False, True, True]), torch.tensor([False, True, False, True])
    delta = encode_delta(obs, following)
    assert delta.dtype == torch.bool
    assert torch.equal(decode_delta(obs, delta), following)


@examples(100)
@given(
    pair=st.lists(st.tuples(st.floats(-1e4, 1e4, width=32), st.floats(-1e4, 1e4, width=32)), min_size=1),
    obs_dtype=st.sampled_from(FLOATS),
    dtype=st.sampled_from(FLOATS),
)
def test_floats_come_back_within_rounding(pair, obs_dtype, dtype):
    obs, following = torch.tensor(pair, dtype=torch.float64).to(obs_dtype).unbind(-1)
    delta = encode_delta(obs, following, dtype)
    back = decode_delta(obs, delta)
    assert delta.dtype == dtype and back.dtype == obs_dtype
    check_delta(delta, obs, following, "observation")
    unit = torch.finfo(dtype).eps + 3 * torch.finfo(obs_dtype).eps
    size = obs.double().abs() + following.double().abs()
    assert bool(((back.double() - following.double()).abs() <= unit * size + 1e-7).all())


def test_the_difference_is_taken_before_the_cast():
    obs = torch.tensor([100_000.0])  # itself beyond float16
    delta = encode_delta(obs, obs + 0.25)
    assert decode_delta(obs, delta).item() == 100_000.25
    big = torch.tensor([2.0**40], dtype=torch.float64)
    assert decode_delta(big, encode_delta(big, big + 0.5)).item() == 2.0**40 + 0.5


def test_overflow_is_an_error_that_names_the_key_and_the_value():
    obs, following = torch.zeros(3), torch.tensor([1.0, 1e5, -2e5])
    delta = encode_delta(obs, following)
    with pytest.raises(OverflowError) as error:
        check_delta(delta, obs, following, ("agents", "pos"))
    text = str(error.value)
    assert "('agents', 'pos') does not fit torch.float16: the largest difference is 200000" in text
    assert "the maximum of the dtype is 65504" in text and "delta_dtype=torch.bfloat16" in text
    wide = encode_delta(obs, following, torch.float32)
    check_delta(wide, obs, following, "observation")
    assert torch.equal(decode_delta(obs, wide), following)


def test_observations_that_are_no_numbers():
    inf, nan = torch.inf, torch.nan
    obs, following = torch.tensor([0.0, 1.0, inf]), torch.tensor([inf, nan, nan])
    delta = encode_delta(obs, following)
    check_delta(delta, obs, following, "observation")
    assert decode_delta(obs, delta).nan_to_num(posinf=9, nan=5).tolist() == [9, 5, 5]
    for bad, after in ((inf, 1.0), (nan, 1.0), (inf, inf)):
        obs, following = torch.tensor([bad]), torch.tensor([after])
        with pytest.raises(ValueError, match="the delta of 'x' loses 1 values"):
            check_delta(encode_delta(obs, following), obs, following, "x")


def test_encode_refuses():
    with pytest.raises(
        ValueError, match=r"dtype must be a floating dtype such as torch.float16, got torch.int8"
    ):
        encode_delta(torch.zeros(1), torch.zeros(1), torch.int8)
    with pytest.raises(TypeError, match=r"the same real dtype, got torch\.float32 and torch\.float64"):
        encode_delta(torch.zeros(1), torch.zeros(1, dtype=torch.float64))
    with pytest.raises(TypeError, match="the same real dtype"):
        encode_delta(torch.zeros(1, dtype=torch.complex64), torch.zeros(1, dtype=torch.complex64))
    with pytest.raises(
        TypeError, match=r"delta must have the dtype of obs, torch.uint8 .* got torch.float16"
    ):
        decode_delta(torch.zeros(1, dtype=torch.uint8), torch.zeros(1, dtype=torch.float16))


@pytest.fixture
def sample():
    obs = {
        "pos": torch.tensor([[1.0], [2.0]]),
        "image": {"left": torch.tensor([[250], [3]], dtype=torch.uint8)},
    }
    delta = {"pos": torch.tensor([[0.5], [-3.0]]).half(), "image": {"left": torch.tensor([[10], [0]]).byte()}}
    return TensorDict({**obs, "next": {"delta": delta, "reward": torch.zeros(2, 1)}}, [2])


def test_all_deltas_that_are_there(sample):
    out = NextObservationDelta()(sample)
    assert out["next", "pos"].tolist() == [[1.5], [-1.0]]
    assert out["next", "image", "left"].tolist() == [[4], [3]]
    assert ("next", "delta") not in out.keys(True)
    assert set(sample.keys(True, True)) == {
        "pos",
        ("image", "left"),
        ("next", "reward"),
        ("next", "delta", "pos"),
        ("next", "delta", "image", "left"),
    }, "the caller's tensordict is left alone"


def test_named_keys_only(sample):
    out = NextObservationDelta(in_keys=["pos"]).forward(sample)
    assert ("next", "delta", "pos") not in out.keys(True)
    assert ("next", "delta", "image", "left") in out.keys(True)
    assert ("next", "image") not in out.keys(True)
    out = NextObservationDelta(in_keys=[("image", "left"), "pos"]).forward(sample)
    assert ("next", "delta") not in out.keys(True)


def test_deltas_may_stay(sample):
    out = NextObservationDelta(drop_delta=False)(sample)
    assert ("next", "delta", "pos") in out.keys(True) and ("next", "pos") in out.keys(True)


def test_restore_dtype(sample):
    out = NextObservationDelta(restore_dtype=torch.float64)(sample)
    assert out["next", "pos"].dtype == torch.float64
    assert out["next", "image", "left"].dtype == torch.uint8
    assert NextObservationDelta(restore_dtype="root")(sample)["next", "pos"].dtype == torch.float32


def test_a_locked_sample_and_a_second_call(sample):
    sample.lock_()
    transform = NextObservationDelta()
    assert (transform(sample) == transform(sample)).all()


def test_a_delta_that_is_not_there(sample):
    for transform, batch, named in (
        (NextObservationDelta(in_keys=["velocity"]), sample, "('next', 'delta', 'velocity')"),
        (NextObservationDelta(), sample.exclude(("next", "delta")), "('next', 'delta')"),
        (NextObservationDelta(in_keys=["pos"]), sample.exclude("next"), "('next', 'delta', 'pos')"),
    ):
        with pytest.raises(KeyError) as error:
            transform(batch)
        text = error.value.args[0]
        assert f"sample has no entry {named}: wrap the env in flatroll.wrappers.NextObservationDelta" in text
    with pytest.raises(KeyError, match="no entry 'pos'"):
        NextObservationDelta()(sample.exclude("pos"))


def test_constructor_refuses():
    with pytest.raises(
        ValueError, match=r"restore_dtype must be a floating dtype, 'root' or None, got torch.int8"
    ):
        NextObservationDelta(restore_dtype=torch.int8)
    with pytest.raises(ValueError, match="got 'float'"):
        NextObservationDelta(restore_dtype="float")
    with pytest.raises(
        TypeError, match=r"in_keys must be a list of keys, got the string 'pos': write \['pos'\]"
    ):
        NextObservationDelta(in_keys="pos")


def test_the_transform_given_an_env_names_the_wrapper() -> None:
    for env in (gym.make("CartPole-v1"), gym.make_vec("CartPole-v1", num_envs=2)):
        with pytest.raises(
            TypeError, match=r"takes no env, got \w+: wrap the env in flatroll.wrappers.NextObs"
        ):
            NextObservationDelta(env)  # type: ignore[arg-type]
        env.close()
