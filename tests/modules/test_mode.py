"""set_recurrent_mode: what is set, where it reaches, and that it is undone."""

import asyncio
import threading

import pytest

from flatroll.modules import GRUModule, recurrent_mode, set_recurrent_mode


@pytest.mark.parametrize(
    ("mode", "expected"),
    [(True, True), (False, False), ("recurrent", True), ("sequential", False), (None, None)],
)
def test_every_way_to_name_a_mode(mode, expected):
    with set_recurrent_mode(mode):
        assert recurrent_mode() is expected
    assert recurrent_mode() is None


def test_default_is_recurrent():
    with set_recurrent_mode():
        assert recurrent_mode() is True


@pytest.mark.parametrize("mode", ["recurent", "", 1, 0.0])
def test_unknown_mode_is_refused(mode):
    with pytest.raises(ValueError, match=r"mode must be True, False, None, 'recurrent' or 'sequential', got"):
        set_recurrent_mode(mode)


def test_nested_blocks_restore_the_outer_mode_after_an_exception():
    with set_recurrent_mode(True):
        with pytest.raises(RuntimeError), set_recurrent_mode(False):
            raise RuntimeError
        assert recurrent_mode() is True


def test_one_object_entered_twice():
    block = set_recurrent_mode(True)
    with block, set_recurrent_mode(False), block:
        assert recurrent_mode() is True
    assert recurrent_mode() is None


def test_decorated_recursion():
    @set_recurrent_mode("sequential")
    def depth(n):
        return 1 + depth(n - 1) if n else int(recurrent_mode() is False)

    assert depth(3) == 4
    assert depth.__name__ == "depth"
    assert recurrent_mode() is None


def test_generators_cannot_be_decorated():
    def steps():
        yield recurrent_mode()

    async def later():
        yield recurrent_mode()

    for function in (steps, later):
        with pytest.raises(TypeError, match=r"cannot decorate '\w+': its body runs after .* inside it"):
            set_recurrent_mode(True)(function)
    with pytest.raises(TypeError, match="cannot decorate the class 'int': decorate its methods"):
        set_recurrent_mode(True)(int)


def test_blocks_held_over_an_await_are_errors():
    """Each ran in the other's mode; and nothing stays set."""

    async def hold(mode):
        with set_recurrent_mode(mode):
            await asyncio.sleep(0)

    async def both():
        return await asyncio.gather(hold(True), hold(False), return_exceptions=True)

    text = r"a block of set_recurrent_mode\(True\) ended in mode False: it was held across an await"
    first, _ = asyncio.run(both())
    with pytest.raises(RuntimeError, match=text):
        raise first
    assert recurrent_mode() is None


def test_other_threads_do_not_see_it():
    seen = []
    with set_recurrent_mode(True):
        thread = threading.Thread(target=lambda: seen.append(recurrent_mode()))
        thread.start()
        thread.join()
    assert seen == [None]


def test_the_mode_set_wins_over_the_default_of_the_module():
    gru = GRUModule(2, 3, in_key="observation", out_key="features", default_recurrent_mode=True)
    assert gru.recurrent_mode is True
    with set_recurrent_mode("sequential"):
        assert gru.recurrent_mode is False


@pytest.mark.parametrize(("default", "expected"), [("recurrent", True), ("sequential", False), (None, False)])
def test_a_default_mode_may_be_named(default, expected):
    gru = GRUModule(2, 3, in_key="observation", out_key="features", default_recurrent_mode=default)
    assert gru.recurrent_mode is expected
