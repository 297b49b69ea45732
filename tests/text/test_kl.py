"""Controllers of the KL coefficient."""

import math
from types import SimpleNamespace

import pytest

from flatroll.text import AdaptiveKLController, ConstantKLController


def adaptive(**options: object) -> AdaptiveKLController:
    settings: dict[str, object] = {"init_kl_coef": 0.1, "target": 6.0, "horizon": 100}
    return AdaptiveKLController(**(settings | options))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kl", "n_steps", "factor"),
    [(6.0, 50, 1.0), (6.6, 50, 1.05), (600.0, 50, 1.1), (0.0, 50, 0.9), (0.0, 300, 0.4), (600.0, 1000, 3.0)],
)
def test_the_coefficient_follows_the_formula(kl: float, n_steps: int, factor: float) -> None:
    """coef * (1 + clip(KL / target - 1, -0.2, 0.2) * n / horizon), given either way."""
    assert adaptive().update(kl=kl, n_steps=n_steps) == pytest.approx(0.1 * factor)
    # As rewards: minus the coefficient times the KL.
    assert adaptive().update([-0.1 * kl] * n_steps) == pytest.approx(0.1 * factor)


def test_a_kl_above_the_target_raises_the_coefficient() -> None:
    assert adaptive().update(kl=12.0, n_steps=10) > 0.1 > adaptive().update(kl=1.0, n_steps=10)


def test_one_update_takes_no_more_than_nine_tenths() -> None:
    """1 - 0.2 * 10,000 / 100 would be -19, and -19 times the coefficient no coefficient."""
    assert adaptive().update(kl=0.0, n_steps=10_000) == pytest.approx(0.01)


@pytest.mark.parametrize("n_steps", [500, 10_000, 10**9])
def test_the_coefficient_stays_positive(n_steps: int) -> None:
    controller = adaptive()
    for _ in range(500):
        assert controller.update(kl=0.0, n_steps=n_steps) > 0
    assert controller.update([0.0] * 3) > 0


def test_a_coefficient_is_a_float_and_its_model_has_it() -> None:
    import torch

    model = SimpleNamespace(kl_coef=0.0)
    controller = adaptive(model=model)
    assert model.kl_coef == 0.1
    new = controller.update(torch.tensor([-1.0, -2.0]))  # type: ignore[arg-type]
    assert type(new) is float and type(controller.coef) is float and model.kl_coef == new


@pytest.mark.parametrize(
    ("arguments", "options", "text"),
    [
        ((), {}, "pass either"),
        (([-1.0],), {"kl": 1.0}, "pass either"),
        (([],), {}, "kl_values is empty"),
        (([-1.0],), {"n_steps": 2}, "only for kl="),
        (([math.nan],), {}, "must be finite"),
        ((), {"kl": math.inf}, "must be finite"),
        ((), {"kl": 1.0, "n_steps": 0}, "n_steps must be above 0"),
    ],
)
def test_wrong_updates_are_refused_and_change_nothing(arguments: tuple, options: dict, text: str) -> None:  # type: ignore[type-arg]
    controller = adaptive()
    with pytest.raises(ValueError, match=text):
        controller.update(*arguments, **options)
    assert controller.coef == 0.1


@pytest.mark.parametrize("name", ["init_kl_coef", "target", "horizon"])
def test_numbers_must_be_positive(name: str) -> None:
    for value in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match=rf"{name} must lie in \(0, inf\)"):
            adaptive(**{name: value})


def test_a_constant_controller_keeps_its_coefficient() -> None:
    model = SimpleNamespace(kl_coef=0.5)
    controller = ConstantKLController(kl_coef=0.2, model=model)
    assert model.kl_coef == 0.2
    model.kl_coef = 0.9
    assert controller.update([-3.0]) == controller.update() == controller.update(kl=9.0, n_steps=3) == 0.2
    assert model.kl_coef == 0.2
    model.kl_coef = 0.4
    assert ConstantKLController(model=model).coef == 0.4 == model.kl_coef
    with pytest.raises(ValueError, match="kl_coef is missing"):
        ConstantKLController()
    with pytest.raises(ValueError, match=r"kl_coef must lie in \[0, inf\)"):
        ConstantKLController(kl_coef=-0.1)
    for make in (lambda: ConstantKLController(kl_coef=0.1, model=object()), lambda: adaptive(model=object())):
        with pytest.raises(AttributeError, match="'kl_coef', as RolloutFromModel has"):
            make()
