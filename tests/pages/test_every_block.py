"""Each block that stores, saves, writes or collects rows is run by a test that compares them with values of its own."""

import ast
from collections.abc import Iterator
from pathlib import Path

import page_blocks

HERE = Path(__file__).parent
ROWS = {"stores", "saves", "collects"}

# Pages whose blocks are compared by tests elsewhere.
ELSEWHERE = (
    *("docs/training", "docs/losses", "docs/trainers", "docs/other_trainers", "docs/networks"),
    "docs/memory",
    *("docs/normalisation", "docs/porting", "docs/disk", "docs/datasets", "docs/layout/forms"),
    "docs/howto/own_marker",
)

# Blocks without rows of their own to compare, by page and a text that they contain, and why.
WITHOUT = {
    ("README.md", "from flatroll.modules import actor, critic"): "tests/examples/test_learning.py plays them",
    ("README.md", "import matplotlib.pyplot as plt"): "tests/examples/test_learning.py plays them",
    ("docs/agents.md", "rows = agents_of(batch)"): "compared with the team's sums, a block later",
    ("docs/howto/own_transform.md", "class Bytes(Transform):"): "compared a block later",
    ("docs/text.md", "loader = get_dataloader("): "not run: needs a tokenizer",
    ("docs/text.md", "table = Sequences()"): "the page prints what it stores",
    ("docs/text/turns.md", '"num_answers": 8'): "compared with the texts of tools, a block later",
    ("docs/text/turns.md", "branches = [["): "the page prints each action of three texts written by hand",
    ("docs/tour.md", "print(describe(batch))"): "compared a block later",
    (
        "docs/tour.md",
        "collector = Collector(env, policy",
    ): "compared with advantages and slices, two blocks later",
    ("docs/trees.md", "small = MCTSForest()"): "the page prints each value of three steps written by hand",
    ("docs/buffers/writing.md", "def worker(handle):"): "run by tests/buffers/remote/test_processes.py",
    ("docs/cheat_sheet.md", "few = rollout("): "compared with the buffers that it fills",
    ("docs/collecting/resuming.md", "frames_per_batch=0"): "refused",
    ("docs/cleanrl.md", "advantage[step] = trace"): "plain torch, for comparison",
    ("docs/deploy.md", "rows = rollout("): "compared with what the file does with them, two blocks later",
    ("docs/deploy.md", "class Policy:"): "reads no rows; test_deploy.py runs it in a process of its own",
    ("docs/environments/ale.md", "ale_py"): "run by tests/simulators/test_ale_vector.py",
    ("docs/environments/rules.md", "Forgetful"): "refused",
    ("docs/howto/film_and_log.md", "Image.fromarray"): "Pillow's, not run",
    (
        "docs/jax.md",
        'gymnax.make("CartPole-v1")',
    ): "tests/simulators compares gymnax's rows with its own steps",
    (
        "docs/jax.md",
        'gymnax.make("Pendulum-v1")',
    ): "tests/simulators compares gymnax's rows with its own steps",
    ("docs/jax.md", "brax.envs.create"): "tests/simulators compares brax's rows with its own steps",
    ("docs/jax.md", "navix.make"): "tests/simulators compares navix's rows with its own steps",
    ("docs/jax.md", "jumanji.make"): "tests/simulators compares jumanji's rows with its own steps",
    ("docs/simulators.md", "mjlab"): "run by tests/simulators/test_mjlab.py",
    ("docs/simulators.md", "mani_skill"): "run by tests/simulators/test_maniskill.py",
    ("docs/simulators.md", "Isaac-Cartpole"): "not run: needs Isaac Lab",
    ("docs/simulators.md", "in_keys="): "tests/modules/test_in_keys.py collects its like",
    ("docs/simulators.md", "vec_env"): "not run: a VecEnv of the reader's",
    ("docs/workers/ray.md", "with RayCollector("): "not run: needs a cluster; tests/ray runs its like",
    ("docs/workers/ray.md", "buffer.update_priority("): "not run: needs a cluster; tests/ray runs its like",
}


def compared() -> Iterator[tuple[str, str]]:
    """The page and text of each call of ``until`` in the tests of this folder."""
    for file in HERE.glob("test_*.py"):
        tree = ast.parse(file.read_text())
        names = {
            node.targets[0].id: node.value.value
            for node in tree.body
            if isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and isinstance(node.value, ast.Constant)
        }
        for call in ast.walk(tree):
            if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "until":
                page, text = call.args[:2]
                assert isinstance(text, ast.Constant)
                where = names.get(page.id) if isinstance(page, ast.Name) else getattr(page, "value", None)
                # A parametrized page is one of two, both with the same text.
                for each in [where] if where else ["docs/layout.md", "docs/layout/inspect.md"]:
                    yield each, text.value


def test_every_block_with_rows_is_compared() -> None:
    known = {*compared(), *WITHOUT}
    open_blocks = []
    for path in page_blocks.PAGES:
        page = str(path.relative_to(page_blocks.ROOT))
        if page.startswith(ELSEWHERE):
            continue
        texts = [text for where, text in known if where == page]
        for block in page_blocks.blocks_of(path.read_text()):
            if page_blocks.kinds_of(block) & ROWS and not any(text in block.text for text in texts):
                open_blocks.append(f"{page}:{block.line}")
    assert open_blocks == []


def test_every_text_names_one_block() -> None:
    for page, text in {*compared(), *WITHOUT}:
        page_blocks.block_with(page_blocks.ROOT / page, text)
