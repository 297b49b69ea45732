"""Slices that begin at saved states, and the ends of trajectories that a log stores."""

from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import SyncVectorEnv
from gymnasium.wrappers import NormalizeObservation, NormalizeReward
from hypothesis import given
from hypothesis import strategies as st
from replay_logs import MODES, Walk, assert_equal, check_slices, collect, many, vector

from flatroll.buffers import ReplayBuffer, SliceSampler
from flatroll.datasets import ReplayLog, ReplayLogStorage
from flatroll.datasets.replay_log import recorder, state_code
from flatroll.datasets.replay_log.log import describe_log
from flatroll.datasets.replay_log.marks import Markers, decode_marks, encode_marks
from flatroll.datasets.replay_log.replay import Replayer
from flatroll.datasets.replay_log.state_code import _HEAD, StateCode, _checksum, _compress
from flatroll.datasets.replay_log.windows import NEW, Event, Restart, Save, Windows
from flatroll.disk import DamagedFileError
from flatroll.disk.state_tree import to_text
from flatroll.layout.keys import DONE
from flatroll.rollouts import Collector
from flatroll.wrappers.mersenne import draws_until, find_twisters, generator_at, twister_text, words_of


class Hidden(Walk):
    """Has a second generator, which only a seed sets: a reset does not begin an episode anew."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        result = super().reset(seed=seed)
        if seed is not None or not hasattr(self, "hidden"):
            self.hidden = np.random.default_rng(seed)
        self.length = 30 + int(self.np_random.integers(9))
        return result

    def draw(self) -> float:
        return float(self.hidden.random())

    def get_snapshot(self) -> Any:
        return {
            "random": self.np_random.bit_generator.state,
            "hidden": self.hidden.bit_generator.state,
            "numbers": np.array([self.t, self.length]),
            "start": self.start,
        }

    def set_snapshot(self, snapshot: Any) -> None:
        self.np_random.bit_generator.state = snapshot["random"]
        self.hidden.bit_generator.state = snapshot["hidden"]
        self.t, self.length = snapshot["numbers"].tolist()
        self.start = snapshot["start"]


class Forgetful(Hidden):
    """Restores nothing."""

    def set_snapshot(self, snapshot: Any) -> None:
        pass


class Unsaved(Hidden):
    """The same env, without a way to restore its state."""

    get_snapshot: Any = None
    set_snapshot: Any = None


class Single(Hidden):
    """Each entry of its state is a number."""

    def get_snapshot(self) -> Any:
        snapshot = super().get_snapshot()
        return {**snapshot, "t": self.t}

    def set_snapshot(self, snapshot: Any) -> None:
        super().set_snapshot(snapshot)
        self.t = snapshot["t"]


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """States are saved after few rows."""
    for name in ("_FAR", "_FAR_ONLY", "_FAR_TOGETHER"):
        monkeypatch.setattr(recorder, name, 60)
    monkeypatch.setattr(recorder, "_BYTES_PER_ROW", 20)


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts from what envs are begun alone, and the rows from there to those that are wanted."""
    found: Counter[str] = Counter()
    env_rows = Replayer.env_rows

    def counted(self: Replayer, *arguments: Any) -> Any:
        names = {Event: "seed", Restart: "restart", Save: "save"}
        row, origin = arguments[-1]
        found[names[type(origin)]] += 1
        found["rows"] += arguments[1] - row
        return env_rows(self, *arguments)

    monkeypatch.setattr(Replayer, "env_rows", counted)
    return found


@pytest.mark.parametrize("mode", MODES)
def test_a_slice_begins_at_a_saved_state(tmp_path: Path, mode: str, starts: Counter[str]) -> None:
    """Far from the seed, where states of generators do not lead to the rows."""
    make = many(Hidden, mode)
    arguments: dict[str, Any] = {"info_keys": ["t"], "max_frames_per_traj": 33}
    rows = collect(tmp_path / "log", make, batches=30, rows=90, **arguments)

    with ReplayLog(tmp_path / "log", create_env_fn=make) as log:
        assert log.kept == 0
        assert log.stats()["states"] > 3 * 5
        assert f"{log.stats()['states']} saved states" in describe_log(log)
        starts.clear()
        for first in (2600, 2000, 1500, 2300):
            assert_equal(log.rows(first, first + 20), rows[first : first + 20])
        assert starts["save"] >= 4
        assert starts["seed"] == 0
        check_slices(log, rows)


def test_bytes_for_states_are_shared_by_all_envs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No env waits for ever because those of lower numbers are served first."""
    monkeypatch.setattr(recorder, "_BYTES_PER_ROW", 1)
    collect(tmp_path / "log", many(Hidden), batches=60, rows=90)
    with ReplayLog(tmp_path / "log", create_env_fn=many(Hidden)) as log:
        counts = [len(saves) for saves in log._windows.saves]
        assert min(counts) >= 3
        assert max(counts) - min(counts) <= 3
        spent = sum(int(log._windows.get(number).saves[:, 2].sum()) for number in range(60))
        assert spent < 1.2 * len(log)


def test_states_are_saved_where_restarts_are_far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CartPole is begun from states of its generator: their distance is below that of saved states."""
    monkeypatch.setattr(recorder, "_FAR", 384)
    collect(tmp_path / "log", lambda: vector(), batches=20, rows=90)
    with ReplayLog(tmp_path / "log") as log:
        trusted = [restart for env in log._windows.restarts for restart in env]
        assert trusted
        assert log.stats()["states"] == 0


def test_an_env_that_remembers_goes_on_from_a_state(tmp_path: Path, starts: Counter[str]) -> None:
    def one() -> Any:
        return NormalizeObservation(gym.make("CartPole-v1"))

    def make() -> Any:
        return SyncVectorEnv([one, one])

    rows = collect(tmp_path / "log", make, batches=20, rows=60)
    with ReplayLog(tmp_path / "log", create_env_fn=make) as log:
        starts.clear()
        assert_equal(log.rows(1100, 1120), rows[1100:1120])
        assert starts["save"] == 2 or starts["save"] == 1
        assert starts["seed"] == 0


@pytest.mark.parametrize("rows_of_batch", [64, 61])
def test_envs_that_cannot_be_divided_go_on_together(tmp_path: Path, rows_of_batch: int) -> None:
    """Also from a state in the middle of a window's rows."""
    env = gym.make_vec("CartPole-v1", num_envs=4, vectorization_mode="vector_entry_point")
    rows = collect(tmp_path / "log", env, batches=30, rows=rows_of_batch)
    with ReplayLog(tmp_path / "log") as log:
        assert not log._recipe.alone
        assert len(log._windows.saves_of_all) >= 4

        first = 25 * rows_of_batch + 7
        assert_equal(log.rows(first, first + 9), rows[first : first + 9])
        replayer = log._replayer
        assert replayer is not None
        assert not replayer._wrong_saves
        save = replayer._save_before(25)
        assert save is not None
        assert save.window > 18
        check_slices(log, rows)
        assert not replayer._wrong_saves


def test_a_state_that_leads_to_other_rows_is_left_out(tmp_path: Path, starts: Counter[str]) -> None:
    rows = collect(tmp_path / "log", many(Hidden), batches=20, rows=90)
    with ReplayLog(tmp_path / "log", create_env_fn=many(Forgetful)) as log:
        starts.clear()
        assert_equal(log.rows(1700, 1705), rows[1700:1705])
        assert starts["save"] > 0
        assert starts["seed"] > 0
        assert log._replayer is not None
        assert log._replayer._wrong_saves


def test_a_reader_that_cannot_restore_states_needs_none(tmp_path: Path) -> None:
    """As where only the writer has called `register_snapshots`."""
    rows = collect(tmp_path / "log", many(Hidden), batches=20, rows=90)
    with ReplayLog(tmp_path / "log", create_env_fn=many(Unsaved)) as log:
        assert log.stats()["states"] > 0
        assert_equal(log[1700:1705], rows[1700:1705])


@pytest.mark.parametrize("change", ["cut", "noise", "other attributes", "other shapes", "nothing"])
def test_damaged_states_cost_time_and_no_rows(
    tmp_path: Path, change: str, monkeypatch: pytest.MonkeyPatch, starts: Counter[str]
) -> None:
    rows = collect(tmp_path / "log", many(Hidden), batches=20, rows=90)
    decode = StateCode.decode
    state = Windows.state

    def changed_bytes(self: Windows, save: Save) -> bytes:
        data = state(self, save)
        changed = {"cut": data[:-9], "noise": data[:12] + bytes(40), "nothing": b""}
        return changed.get(change, data)

    def changed_tree(self: StateCode, packed: bytes) -> Any:
        tree = decode(self, packed)
        own = tree["env"][-1][2]
        if change == "other attributes":
            own["step"] = own.pop("start")
        if change == "other shapes":
            own["numbers"] = np.zeros((2, 2), np.int64)
        return tree

    monkeypatch.setattr(Windows, "state", changed_bytes)
    monkeypatch.setattr(StateCode, "decode", changed_tree)
    with ReplayLog(tmp_path / "log", create_env_fn=many(Hidden)) as log:
        starts.clear()
        assert_equal(log.rows(1700, 1705), rows[1700:1705])
        assert starts["seed"] > 0


def test_states_of_lost_rows_are_not_stored(tmp_path: Path) -> None:
    """Resets follow the states that were just saved, and errors lose the rows behind others."""
    make = many(Hidden)
    calls = 0

    def policy(obs: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return torch.full((3,), 4 + calls % 3)

    parts = []
    with Collector(
        make, policy, frames_per_batch=50, total_frames=50 * 40, seed=3, log=tmp_path / "log"
    ) as collector:
        for number, batch in enumerate(collector):
            parts.append(batch)
            if number % 7 == 3:
                collector.reset()
            if number % 7 == 5:
                collector.restart()
    rows: Any = torch.cat(parts)
    with ReplayLog(tmp_path / "log", create_env_fn=make) as log:
        check_slices(log, rows)
        assert log._replayer is not None
        assert not log._replayer._wrong_saves


def test_states_are_few_bytes() -> None:
    """Where the generator has drawn, only how often is stored; a state like another base is refused."""
    words = words_of(np.random.MT19937(3))
    later = generator_at(words)
    later.random_raw(12_345, output=False)

    def tree(state: Any, value: int) -> Any:
        return {"emulator": b"\1" * 900 + twister_text(state) + b".", "screen": np.full(999, value, np.uint8)}

    code = StateCode(tree(words, 0))
    packed = code.encode(tree(words_of(later), 7))
    again = StateCode(tree(words, 0)).decode(packed)
    assert again["emulator"] == tree(words_of(later), 7)["emulator"]
    assert (again["screen"] == 7).all()
    assert len(packed) < 150

    whole = StateCode().encode(tree(words_of(later), 7))
    assert len(whole) > 2500
    assert StateCode().decode(whole)["emulator"] == again["emulator"]
    for other in (StateCode(), StateCode(tree(words, 1)), StateCode({"screen": 3})):
        with pytest.raises(DamagedFileError, match="cannot be read"):
            other.decode(packed)


@given(st.binary(max_size=200))
def test_noise_is_no_state(noise: bytes) -> None:
    with pytest.raises(DamagedFileError, match="a state of the log cannot be read"):
        StateCode().decode(noise)


def test_a_state_does_not_claim_more_than_it_is() -> None:
    packed = StateCode().encode({"zeros": np.zeros(1000, np.uint8)})
    claims = (2**31).to_bytes(4, "little") + packed[4:]
    with pytest.raises(DamagedFileError, match="claims"):
        StateCode().decode(claims)


def forged(description: Any, entries: list[Any], data: bytes = b"") -> bytes:
    """A state with the checksum that it must have."""
    text = to_text([description, entries]).encode()
    head = state_code._HEAD.pack(len(text + data), state_code._checksum(text, [data]), len(text))
    return head + state_code._compress(text + data, b"")


ARRAY = ["0.raw", "uint8", 3, False, [], []]


@pytest.mark.parametrize(
    ("description", "entries"),
    [
        ("other", [["0.raw", "float32", 3, False, [], []]]),  # 3 bytes are no float32
        ("other", [["0.raw", "object", 3, False, [], []]]),
        ("other", [ARRAY, ["0.raw", "uint8", 0, False, [], []]]),
        ("other", [["0.raw", "uint8", 3, True, [], []]]),  # like a base that is not there
        ("other", [["0.raw", "uint8", 3, False, [0], [2**40]]]),
        ("other", [["0.raw", "uint8", 3, False, [4], [None]]]),
        ("other", [["0.raw", "uint8", 3, False, [0], []]]),
        (["dict", [["\0bytes", "no array"]]], [ARRAY]),
        (["array", "1.raw", "<u1", [3]], [ARRAY]),
        ("other", [ARRAY[:5]]),
        ("other", [7]),
    ],
    ids=str,
)
def test_states_that_no_writer_makes_are_refused(description: Any, entries: list[Any]) -> None:
    assert StateCode().decode(forged("the state", [ARRAY], b"abc")) == "the state"
    with pytest.raises(DamagedFileError, match="a state of the log cannot be read"):
        StateCode().decode(forged(description, entries, b"abc"))


@given(st.lists(st.integers(0, 2000), min_size=1, max_size=4), st.booleans())
def test_generators_are_followed_from_state_to_state(steps: list[int], together: bool) -> None:
    """Each state is read alone; where a generator goes back, its words are stored from then on."""
    base = words_of(np.random.MT19937(3))

    def tree(words: Any) -> Any:
        text = b"a" + twister_text(words) + b"."
        return {"one": text + (twister_text(base) + b"," if together else b""), "other": np.arange(5)}

    code = StateCode(tree(base))
    generator = generator_at(base)
    states = []
    for step in steps:
        generator.random_raw(step, output=False)
        states.append(tree(words_of(generator)))

    packed = [code.encode(state) for state in states]
    for state, one in zip(states, packed, strict=True):
        assert StateCode(tree(base)).decode(one)["one"] == state["one"]
        assert len(one) < 200


def test_a_generator_that_went_back_is_stored_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that follow: it is not known any more how far it is from the base."""
    monkeypatch.setattr(state_code, "_MOST_ROUNDS", 5)
    base = words_of(np.random.MT19937(3))
    later = generator_at(base)
    later.random_raw(999, output=False)
    code = StateCode(twister_text(base))
    lengths = []
    for words in (base, words_of(later), base, words_of(later)):
        packed = code.encode(twister_text(words))
        assert StateCode(twister_text(base)).decode(packed) == twister_text(words)
        lengths.append(len(packed))
    assert max(lengths[:2]) < 100
    assert min(lengths[2:]) > 2000


@pytest.mark.parametrize("draws", [0, 1, 623, 624, 625, 9999])
def test_the_draws_of_a_generator_are_counted(draws: int) -> None:
    words = words_of(np.random.MT19937(1))
    later = generator_at(words)
    later.random_raw(draws, output=False)
    [found] = find_twisters(b"x" + twister_text(words_of(later)))
    assert draws_until(generator_at(words), found.words, 20) == draws
    assert draws_until(np.random.MT19937(2), found.words, 20) is None


@given(st.lists(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=9), min_size=1, max_size=5))
def test_marks_are_read_as_they_were_written(envs: list[list[tuple[bool, bool]]]) -> None:
    flags = np.array([pair for env in envs for pair in env], bool).reshape(-1, 2)
    counts = np.array([len(env) for env in envs])
    init, done = decode_marks(encode_marks(flags[:, 0], flags[:, 1], counts), counts)
    assert (init == flags[:, 0]).all()
    assert (done == flags[:, 1]).all()


@given(st.binary(max_size=30))
def test_noise_gives_marks_or_an_error(noise: bytes) -> None:
    try:
        init, done = decode_marks(b"\0" + noise, np.array([3, 0, 2]))
    except DamagedFileError:
        return
    assert len(init) == len(done) == 5


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rows_of_batch", [90, 7, 2])
def test_markers_are_those_of_the_rows(tmp_path: Path, mode: str, rows_of_batch: int) -> None:
    """Also after resets in the middle of episodes, and where a second collector goes on."""
    make = many(Walk, mode)
    arguments: dict[str, Any] = {"rows": rows_of_batch, "max_frames_per_traj": 4}
    collect(tmp_path / "log", make, batches=9, **arguments)
    with Collector(
        make,
        frames_per_batch=rows_of_batch,
        total_frames=9 * rows_of_batch,
        log=tmp_path / "log",
        max_frames_per_traj=4,
    ) as collector:
        for number, _ in enumerate(collector):
            if number % 3 == 1:
                collector.reset()

    with ReplayLog(tmp_path / "log", create_env_fn=make) as log:
        layout = log._layout
        markers = Markers(log._windows, layout.init, layout.traj, layout.counts)
        rows = log.rows()
        assert DONE in markers.keys
        assert layout.counts
        for number, end in enumerate(log._windows.ends):
            found = markers.next()
            for key in markers.keys:
                own: Any = rows[log._windows.begins(number) : end]
                assert torch.equal(found.get(key), own.get(key)), key


def test_a_buffer_of_slices_makes_one_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    collect(tmp_path / "log", lambda: vector(), batches=12, rows=90)
    asked = []
    rows = ReplayLog.rows

    def noted(self: ReplayLog, first: int | None = None, end: int | None = None) -> Any:
        asked.append((first, end))
        return rows(self, first, end)

    monkeypatch.setattr(ReplayLog, "rows", noted)
    with ReplayLog(tmp_path / "log") as log:
        buffer = ReplayBuffer(storage=ReplayLogStorage(log), sampler=SliceSampler(slice_len=6), batch_size=24)
        assert len(buffer) == 12 * 90
        assert asked == [(0, 90)]
        assert len(buffer.sample()) == 24


def test_ends_that_are_not_those_of_the_rows_are_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = encode_marks

    def wrong(init: Any, done: Any, counts: Any) -> bytes:
        changed = done.copy()
        changed[5] ^= True
        return encode(init, changed, counts)

    monkeypatch.setattr(recorder, "encode_marks", wrong)
    monkeypatch.setattr(recorder.Recorder, "_try", lambda self, window: None)
    collect(tmp_path / "log", lambda: vector(), batches=2, rows=90)
    with ReplayLog(tmp_path / "log") as log, pytest.raises(DamagedFileError, match="other ends of traj"):
        log.rows(0, 20)


class Unseeded:
    """A simulator in torch whose ``reset`` takes no seed: a new one always makes the same rows."""

    num_envs = 2
    device = torch.device("cpu")
    single_observation_space = gym.spaces.Box(-1e9, 1e9, (2,))
    single_action_space = gym.spaces.Discrete(2)
    metadata: ClassVar[dict[str, Any]] = {"autoreset_mode": gym.vector.AutoresetMode.SAME_STEP}

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(5)
        self.t = torch.zeros(2)

    def reset(self, options: Any = None) -> Any:
        self.t = torch.zeros(2)
        return self.shown(), {}

    def shown(self) -> torch.Tensor:
        return torch.stack([self.t, torch.rand(2, generator=self.generator)], 1)

    def step(self, action: torch.Tensor) -> Any:
        self.t = self.t + 1 + action
        ended = self.t > 8
        last = self.shown()
        self.t = torch.where(ended, 0, self.t)
        shown = torch.where(ended[:, None], self.shown(), last)
        return shown, action.float(), ended, torch.zeros_like(ended), {"final_obs": last}


class UnseededAndSaved(Unseeded):
    def get_snapshot(self) -> Any:
        return {"t": self.t.clone(), "random": self.generator.get_state()}

    def set_snapshot(self, snapshot: Any) -> None:
        self.t = snapshot["t"].clone()
        self.generator.set_state(snapshot["random"])


@pytest.mark.parametrize("kind", [Unseeded, UnseededAndSaved])
def test_a_vector_env_that_takes_no_seed(tmp_path: Path, kind: type[Unseeded]) -> None:
    """It is made anew for rows before those that were read, and a buffer of slices samples from it."""
    rows = collect(tmp_path / "log", kind, batches=30, rows=16, seed=None)
    with ReplayLog(tmp_path / "log", create_env_fn=kind) as log:
        assert log.kept == 0
        assert [event.seed for event in log._windows.seeds] == [NEW]
        assert bool(log.stats()["states"]) == (kind is UnseededAndSaved)
        check_slices(log, rows)
        assert log._replayer is not None
        assert not log._replayer._wrong_saves

        buffer = ReplayBuffer(storage=ReplayLogStorage(log), sampler=SliceSampler(slice_len=3), batch_size=12)
        sample, info = buffer.sample(return_info=True)
        at = info["index"]
        for key in ("observation", ("next", "observation"), "action"):
            own: Any = rows[at]
            assert torch.equal(sample.get(key), own.get(key))


@pytest.mark.parametrize("name", ["Acrobot-v1", "Pendulum-v1", "MountainCar-v0", "MountainCarContinuous-v0"])
def test_states_of_classic_control_lead_to_their_rows(
    tmp_path: Path, name: str, starts: Counter[str]
) -> None:
    """MountainCar holds an array after a reset and a tuple after a step, the continuous one other dtypes."""
    rows = collect(tmp_path / "log", gym.make(name), batches=6, rows=30)
    with ReplayLog(tmp_path / "log") as log:
        starts.clear()
        for first in (170, 130, 160):
            assert_equal(log[first : first + 5], rows[first : first + 5])
        assert starts["save"] > 0
        assert log._replayer is not None
        assert not log._replayer._wrong_saves


def test_states_of_normalized_rewards_lead_to_their_rows(tmp_path: Path) -> None:
    """Its variance is an array first, and a number after some steps."""

    def make() -> Any:
        return NormalizeReward(gym.make("Pendulum-v1", max_episode_steps=70))

    rows = collect(tmp_path / "log", make, batches=8, rows=30)
    with ReplayLog(tmp_path / "log", create_env_fn=make) as log:
        for first in (230, 150, 190):
            assert_equal(log[first : first + 5], rows[first : first + 5])
        assert log._replayer is not None
        assert log.stats()["states"] > 1
        assert not log._replayer._wrong_saves


def _state_of(description: Any, parts: Any, body: bytes = b"") -> bytes:
    """A state as a file of strangers may have it."""
    text = to_text([description, parts]).encode()
    data = text + body
    return _HEAD.pack(len(data), _checksum(text, [body]), len(text)) + _compress(data, b"")


@pytest.mark.parametrize(
    "packed",
    [
        _state_of(["dict", []], [["a", "float32", 3, False, [], []]], b"abc"),
        _state_of(["dict", [["\0bytes", 3]]], []),
        _state_of(["dict", []], [["a", "uint8", 0, False, [], []]] * 2),
    ],
    ids=["a part of a number", "bytes that are none", "a part twice"],
)
def test_a_state_that_no_writer_makes_is_damaged(packed: bytes) -> None:
    with pytest.raises(DamagedFileError, match="a state of the log cannot be read"):
        StateCode().decode(packed)


@pytest.mark.parametrize("changed", [("t", "9"), ("start", [1.0]), ("start", {})], ids=str)
def test_a_number_of_a_state_stays_one(tmp_path: Path, changed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other values would raise an error in the env's step."""
    rows = collect(tmp_path / "log", many(Single), batches=20, rows=90)
    decode = StateCode.decode

    def decode_other(self: StateCode, packed: bytes) -> Any:
        tree = decode(self, packed)
        name, value = changed
        tree["env"][-1][2][name] = value
        return tree

    monkeypatch.setattr(StateCode, "decode", decode_other)
    with ReplayLog(tmp_path / "log", create_env_fn=many(Single)) as log:
        assert_equal(log[1700:1705], rows[1700:1705])
        assert log._replayer is not None
        assert log._replayer._wrong_saves
