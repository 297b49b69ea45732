"""An AsyncVectorEnv whose workers die or hang: an error that says so, a close that ends, a quiet finaliser."""

import sys
import textwrap

import interpreters
import pytest

HEAD = """
import gc, os, signal, time, gymnasium as gym, numpy as np
from flatroll.rollouts import Collector
from flatroll.wrappers import as_vector_env
env = gym.make_vec("CartPole-v1", num_envs=3, vectorization_mode="async")
handle = as_vector_env(env)
handle.reset()
def kill(worker, how=signal.SIGKILL):
    os.kill(env.processes[worker].pid, how)
    if how == signal.SIGKILL:
        env.processes[worker].join()
"""

SCRIPTS = {
    "a worker that died between two steps": """
        kill(1)
        try: handle.step([0, 0, 0])
        except RuntimeError as error: assert "[1] of AsyncVectorEnv have died" in str(error), error
        else: raise AssertionError
        handle.close()
        """,
    "a close after a worker died": "kill(1); handle.close()",
    "a collector dropped after a worker died": """
        collector = Collector(env, frames_per_batch=6)
        next(collector); kill(0)
        try: next(collector)
        except RuntimeError as error: assert "have died" in str(error)
        else: raise AssertionError
        del collector, handle, env; gc.collect()
        """,
    "a close in the middle of a step that nobody finishes": """
        import flatroll.wrappers.gym_source as source
        source.CLOSE_SECONDS = 0.2
        kill(2, signal.SIGSTOP); env.step_async(np.zeros(3, int)); handle.close()
        """,
    "an env dropped in the middle of a step": "env.step_async(np.zeros(3, int)); del handle, env; gc.collect()",
    "an interpreter that ends in the middle of a step": "env.step_async(np.zeros(3, int))",
    "an interpreter that ends": "collector = Collector(env, frames_per_batch=6); next(collector)",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_it_ends_quietly(name: str) -> None:
    script = HEAD + textwrap.dedent(SCRIPTS[name])
    done = interpreters.run([sys.executable, "-c", script])
    assert done.returncode == 0, done.stderr
    told = [
        line for line in done.stderr.splitlines() if "pending call" not in line and "logger.warn" not in line
    ]
    assert not any(map(str.strip, told)), done.stderr
