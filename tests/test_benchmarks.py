"""The way benchmarks measure, under a made-up clock; what they measured is never a test."""

import contextlib
import gc
import json

import pytest

from benchmarks import registry, timing
from benchmarks.__main__ import load, main
from benchmarks.output import table, write_json
from benchmarks.registry import Pair, Quantity, Side


class Clock:
    """Moves only when a side of a pair moves it."""

    def __init__(self):
        self.now = 0

    def __call__(self):
        return self.now

    def tick(self, ns):
        self.now += ns


def make_pair(clock, ours_ns, reference_ns, target=1.0):
    return Pair(
        "pair", target, lambda: (Side(clock.tick, (ours_ns,)), Side(clock.tick, (reference_ns,)))
    )


@pytest.fixture
def empty_registry(monkeypatch):
    monkeypatch.setattr(registry, "REGISTRY", {})
    return registry


def make_result(**changes):
    fields = {
        "name": "some op",
        "value": 0.9,
        "target": 1.0,
        "unit": "",
        "low": 0.8,
        "high": 1.25,
        "ours_ns": 900.0,
        "reference_ns": 1000.0,
        "rounds": 3,
        "note": "",
    }
    return timing.Result(**{**fields, **changes})


@pytest.mark.parametrize(
    ("ours_ns", "reference_ns", "target", "met"),
    [(90, 100, 1.0, True), (100, 100, 1.0, True), (150, 100, 1.0, False), (500, 100, 6, True)],
)
def test_ratio_is_ours_over_the_reference(ours_ns, reference_ns, target, met):
    clock = Clock()
    pair = make_pair(clock, ours_ns, reference_ns, target)
    result = timing.measure_pair(pair, rounds=5, block_ms=0.01, clock=clock)
    assert result.value == ours_ns / reference_ns
    assert (result.ours_ns, result.reference_ns) == (ours_ns, reference_ns)
    assert result.met is met


def test_one_disturbed_round_does_not_move_the_ratio():
    clock = Clock()
    rounds = 0

    def context():
        nonlocal rounds
        rounds += 1
        return contextlib.nullcontext()

    def ours():
        clock.tick(10_000 if rounds == 8 else 50)

    pair = Pair("pair", 1, lambda: (Side(ours, (), context), Side(clock.tick, (100,))))
    result = timing.measure_pair(pair, rounds=21, block_ms=0.001, clock=clock)
    assert rounds > 8
    assert result.value == 0.5


def test_sides_alternate_and_so_does_who_goes_first():
    clock, entered = Clock(), []

    def side(name):
        @contextlib.contextmanager
        def context():
            entered.append(name)
            yield

        return Side(clock.tick, (1_000_000,), context)

    pair = Pair("pair", 1, lambda: (side("ours"), side("reference")))
    timing.measure_pair(pair, rounds=4, block_ms=1, clock=clock)
    ours_first = ["ours", "reference"]
    assert entered[-8:] == (ours_first + ours_first[::-1]) * 2


def test_fresh_arguments_and_contexts_are_not_timed():
    clock, seen = Clock(), []

    def fresh(n):
        clock.tick(1_000_000)
        return [(clock, index) for index in range(n)]

    @contextlib.contextmanager
    def context():
        clock.tick(1_000_000)
        yield
        clock.tick(1_000_000)

    def call(clock, index):
        seen.append(index)
        clock.tick(7)

    assert timing.block_ns(Side(call, context=context, fresh=fresh), 3, clock) == 21
    assert seen == [0, 1, 2]


def test_collector_is_off_while_timing_and_back_afterwards_even_after_an_error():
    states = []

    def fail():
        states.append(gc.isenabled())
        raise KeyError("planted")

    assert gc.isenabled()
    with pytest.raises(KeyError, match="planted"):
        timing.block_ns(Side(fail), 1, Clock())
    assert states == [False]
    assert gc.isenabled()


@pytest.mark.parametrize("call_ns", [1, 40, 5_000, 3_000_000])
def test_blocks_are_filled_without_running_far_over(call_ns):
    clock = Clock()
    n = timing.calls_per_block(Side(clock.tick, (call_ns,)), 2.0, clock)
    assert n == 1_000_000 or 2e6 <= n * call_ns <= max(2.3e6, call_ns)


def test_a_slow_first_call_does_not_pass_for_a_full_block():
    clock = Clock()
    durations = iter([1_000_000_000])
    side = Side(lambda: clock.tick(next(durations, 1_000)))
    assert timing.calls_per_block(side, 2.0, clock) >= 2_000


def test_quantity_is_the_median_of_its_samples():
    samples = iter([5.0, 1.0, 2.0])
    result = timing.measure_quantity(Quantity("q", 2.0, "s", lambda: next(samples), repeats=3))
    assert (result.value, result.unit, result.rounds, result.met) == (2.0, "s", 3, True)


def test_a_name_is_taken_once(empty_registry):
    empty_registry.pair("same", target=1)(lambda: None)
    with pytest.raises(ValueError, match="`same` is registered already"):
        empty_registry.quantity("same", target=1, unit="s", repeats=1)(lambda: 0.0)


def test_table_tells_a_missed_target():
    import_time = make_result(name="import", value=0.05, target=0.1, unit="s", ours_ns=None)
    text = table([make_result(), make_result(name="slow op", value=1.2), import_time])
    header, rule, first, second, third = text.splitlines()
    assert set(rule) == {"-"}
    assert header.split()[:3] == ["benchmark", "value", "target"]
    assert first.split("  ")[0] == "some op"
    assert first.endswith("0.900       1      ok  0.800..1.250  0.90 us    1.00 us")
    assert "MISSED" in second
    assert "MISSED" not in first + third
    assert "0.050 s" in third


def test_json_holds_every_field(tmp_path):
    path = tmp_path / "out.json"
    write_json([make_result(value=1.5)], path)
    written = json.loads(path.read_text())
    assert written["results"][0]["value"] == 1.5
    assert written["results"][0]["met"] is False
    assert written["environment"]["torch_threads"] >= 1


@pytest.mark.parametrize("name", [name for name, b in load().items() if isinstance(b, Pair)])
def test_both_sides_of_every_pair_run(name):
    for side in load()[name].build():
        with side.context():
            for args in side.arguments(3):
                side.call(*args)


@pytest.mark.parametrize(("target", "status"), [(1e9, 0), (0.0, 1)])
def test_check_turns_a_missed_target_into_the_exit_status(
    empty_registry, monkeypatch, tmp_path, capsys, target, status
):
    monkeypatch.setattr("benchmarks.__main__.load", lambda: empty_registry.REGISTRY)
    monkeypatch.setattr("torch.set_num_threads", lambda n: None)
    empty_registry.pair("mine", target=target)(lambda: (Side(abs, (1,)), Side(abs, (1,))))
    path = tmp_path / "out.json"
    options = ["--check", "--rounds", "1", "--block-ms", "0.01", "--json", str(path)]
    assert main(options) == status
    assert "mine" in capsys.readouterr().out
    assert json.loads(path.read_text())["results"][0]["name"] == "mine"


def test_unknown_name_is_told(empty_registry, monkeypatch, capsys):
    monkeypatch.setattr("benchmarks.__main__.load", lambda: empty_registry.REGISTRY)
    assert main(["--only", "nothing"]) == 2
    assert "`nothing`" in capsys.readouterr().out
