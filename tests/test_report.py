import contextlib
import dataclasses
import json
import os
import sys
import threading

import expecttest
import pytest
import torch
from caches import HandOut, Keep, detached
from torch.testing._internal.two_tensor import TwoTensor

from viewtrack import MutatedTensorError, ViewTrackError
from viewtrack.ledger import Region, Write
from viewtrack.report import (
    Alias,
    HazardRow,
    OpRow,
    Recorder,
    Report,
    ViewRow,
    WriteRow,
    from_json,
    to_json,
    to_text,
)
from viewtrack.site import UNKNOWN, Site
from viewtrack.smuggled import Hazard

FORWARD = Site("model.py", 41, "forward")
WRITE = Write(
    op="aten.silu_.default",
    argument="self",
    site=Site("model.py", 42, "forward"),
    thread="MainThread",
    version_before=0,
    version_after=1,
    region=Region(0, (4, 4), (4, 1), 4),
    count=1,
)
HAZARD = Hazard(
    op="aten.mm.default",
    result="f32[4, 4]",
    saved=FORWARD,
    keeper="Caching",
    writes=(WRITE,),
    use="by Cached in place of aten.mm.default",
    used=FORWARD,
    through=("aten._unsafe_view.default",),
)
REPORT = Report(
    program="train.py --bug",
    ended="exit status 0",
    torch="2.13.0",
    record="site",
    hazards=(HazardRow(HAZARD, 12),),
    views=(ViewRow("aten.detach.default", Site("model.py", 12, "__torch_dispatch__", True), 24),),
    writes=(
        WriteRow("aten._foreach_add_.List", "self", Site("train.py", 7, "<module>"), 100),
        WriteRow("aten.silu_.default", "self", WRITE.site, 12),
    ),
    aliases=(Alias("aten._unsafe_view.default", FORWARD),),
    ops=(OpRow("aten.mm.default", 30), OpRow("aten.silu_.default", 12)),
)
EMPTY = Report("script.py", "", "2.13.0", "site", (), (), (), (), ())


class TestText(expecttest.TestCase):
    maxDiff = None

    def test_everything(self):
        self.assertExpectedInline(
            to_text(REPORT),
            """\
viewtrack report on `train.py --bug`
torch 2.13.0, record=site, ended with exit status 0

hazards (kept by a mode or a hook, then written, then used again): 1

  1  kept     aten.mm.default -> f32[4, 4]
              model.py:41 in forward
              by Caching
     written  aten.silu_.default(self)
              model.py:42 in forward
              through aten._unsafe_view.default, version 0 -> 1, thread MainThread
     used     by Cached in place of aten.mm.default
              model.py:41 in forward
              12 times in all
     mend     write out of place at model.py:42, or let a copy be kept

views made below autograd: 24
  24  aten.detach.default  model.py:12 in __torch_dispatch__

writes: 112
  100  aten._foreach_add_.List(self)  train.py:7 in <module>
   12  aten.silu_.default(self)       model.py:42 in forward

undeclared aliases (ops that return memory of an argument, unsaid by their schema): 1
  aten._unsafe_view.default  first at model.py:41 in forward

ops: 42
  30  aten.mm.default
  12  aten.silu_.default
""",
        )

    def test_what_ran_elsewhere(self):
        names = tuple(f"Thread-{n} (work)" for n in range(1, 6))
        for threads, processes, want in [
            (names[:1], 0, "1 other thread (Thread-1 (work))"),
            (
                names[:2],
                1,
                "2 other threads (Thread-1 (work), Thread-2 (work)) and of 1 forked process",
            ),
            (
                names,
                0,
                "5 other threads (Thread-1 (work), Thread-2 (work), Thread-3 (work), 2 more)",
            ),
            ((), 2, "2 forked processes"),
        ]:
            report = dataclasses.replace(EMPTY, threads=threads, processes=processes)
            assert f"\n\nnot in this report: ops, if any, of {want}\n\n" in to_text(report)

    def test_nothing(self):
        self.assertExpectedInline(
            to_text(EMPTY),
            """\
viewtrack report on `script.py`
torch 2.13.0, record=site

hazards (kept by a mode or a hook, then written, then used again): none
  in this thread and process; what autograd itself saved is watched by --guard-saved

views made below autograd: none

writes: none

undeclared aliases (ops that return memory of an argument, unsaid by their schema): none

ops: none
""",
        )

    def test_a_write_through_an_undeclared_alias(self):
        through = ("", "aten._unsafe_view.default")
        hazard = dataclasses.replace(HAZARD, writes=(WRITE, WRITE), through=through)
        text = to_text(dataclasses.replace(EMPTY, hazards=(HazardRow(hazard, 1),)))
        self.assertExpectedInline(
            text[text.index("     written") : text.index("     used")],
            """\
     written  aten.silu_.default(self)
              model.py:42 in forward
              version 0 -> 1, thread MainThread
     written  aten.silu_.default(self)
              model.py:42 in forward
              through aten._unsafe_view.default, version 0 -> 1, thread MainThread
""",
        )

    def test_saved_for_backward_with_stacks(self):
        stack = (
            ("train.py", 9, "step"),
            (torch.__file__, 1, "call"),
            ("train.py", 30, "<module>"),
        )
        site = Site("train.py", 9, "step", stack=stack)
        hazard = Hazard("", "f32[4]", site, "save_on_cpu", (WRITE,), "in backward", FORWARD)
        report = Report("x.py", "", "2.13.0", "stack", (HazardRow(hazard, 1),), (), (), (), ())
        self.assertExpectedInline(
            to_text(report),
            """\
viewtrack report on `x.py`
torch 2.13.0, record=stack

hazards (kept by a mode or a hook, then written, then used again): 1

  1  kept     saved for backward: f32[4]
              train.py:9 in step
                called from train.py:30 in <module>
              by save_on_cpu
     written  aten.silu_.default(self)
              model.py:42 in forward
              version 0 -> 1, thread MainThread
     used     in backward
              model.py:41 in forward
              once in all
     mend     write out of place at model.py:42, or let a copy be kept

views made below autograd: none

writes: none

undeclared aliases (ops that return memory of an argument, unsaid by their schema): none

ops: none
""",
        )

    def test_no_record(self):
        rows = (WriteRow("aten.add_.Tensor", "self", UNKNOWN, 3),)
        report = Report("x.py", "exit status 1", "2.13.0", "none", (), (), rows, (), ())
        self.assertExpectedInline(
            to_text(report),
            """\
viewtrack report on `x.py`
torch 2.13.0, record=none, ended with exit status 1

hazards: not looked for (record=none)

views made below autograd: none

writes: 3
  3  aten.add_.Tensor(self)  line unknown

undeclared aliases (ops that return memory of an argument, unsaid by their schema): none

ops: none
""",
        )

    def test_long_tables_are_cut(self):
        ops = tuple(OpRow(f"aten.op{n}.default", 10 - n) for n in range(5))
        report = Report("x.py", "", "2.13.0", "site", (), (), (), (), ops)
        self.assertExpectedInline(
            to_text(report, limit=2).partition("ops:")[2],
            """\
 40
  10  aten.op0.default
   9  aten.op1.default
  and 3 more rows
""",
        )
        assert "more" not in to_text(report, limit=None)


def test_lines_are_shown_with_their_source(tmp_path, monkeypatch):
    (tmp_path / "code.py").write_text("x = 1\nif x:\n    y = [\n")
    monkeypatch.chdir(tmp_path)
    site = Site(str(tmp_path / "code.py"), 3, "<module>")
    text = to_text(Report("x.py", "", "2.13.0", "site", (), (), (), (Alias("a.b", site),), ()))
    assert "  a.b  first at code.py:3 in <module>:  y = [\n" in text


ELSEWHERE = dataclasses.replace(EMPTY, threads=("a", "b"), processes=3)


@pytest.mark.parametrize(
    "report", [REPORT, EMPTY, ELSEWHERE], ids=["everything", "nothing", "elsewhere"]
)
def test_json_and_back(report):
    assert from_json(to_json(report)) == report


def test_a_report_from_before_threads_were_noted():
    data = json.loads(to_json(EMPTY))
    del data["threads"], data["processes"]
    assert from_json(json.dumps(data)) == EMPTY


def test_a_hazard_from_before_aliases_were_noted():
    data = json.loads(to_json(REPORT))
    del data["hazards"][0]["hazard"]["through"]
    [row] = from_json(json.dumps(data)).hazards
    assert row.hazard == dataclasses.replace(HAZARD, through=())


def test_json_is_plain():
    data = json.loads(to_json(REPORT))
    assert data["format"] == 1
    [row] = data["hazards"]
    assert row["count"] == 12
    assert row["hazard"]["saved"]["lineno"] == 41
    assert row["hazard"]["writes"][0]["region"]["size"] == [4, 4]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("no json", "not a report of viewtrack"),
        ("[]", "not a report of viewtrack"),
        ("{}", "not a report of viewtrack"),
        ('{"format": 1}', "not a report of viewtrack: 'hazards'"),
        ('{"format": 99}', "a report of format 99, and this viewtrack reads format 1"),
    ],
)
def test_what_is_no_report(text, why):
    with pytest.raises(ViewTrackError) as caught:
        from_json(text)
    assert str(caught.value).startswith(why)


# ------------------------------------------------------------------------------ recording


def recorded(run, record="site"):
    with Recorder(record) as recorder:
        run()
    return recorder.report("test", "well")


X = torch.full((4, 4), 2.0)


def cached_and_spoilt():
    keep = Keep(detached)
    with keep:
        out = X @ X
    out.mul_(3)
    with HandOut(keep):
        X @ X


def test_ops_are_counted():
    report = recorded(lambda: [X.neg(), X.neg(), X.sum()])
    assert report.ops == (OpRow("aten.neg.default", 2), OpRow("aten.sum.default", 1))
    assert (report.program, report.ended, report.torch) == ("test", "well", torch.__version__)


def test_writes_are_counted_by_line():
    def run():
        ts = [torch.ones(2), torch.ones(2)]
        for _ in range(3):
            torch._foreach_add_(ts, 1.0)
        ts[0].mul_(2).mul_(3)
        torch.add(ts[0], 1, out=ts[1])

    first = run.__code__.co_firstlineno
    assert [
        (row.op, row.argument, row.site.lineno - first, row.count) for row in recorded(run).writes
    ] == [
        ("aten._foreach_add_.Scalar", "self", 3, 6),
        ("aten.mul_.Tensor", "self", 4, 2),
        ("aten.add.out", "out", 5, 1),
    ]


def test_views_are_counted_where_a_handler_made_them():
    def reshaped(t):
        return t.t().reshape(-1), t.view(-1)  # the first is a copy

    def run():
        with Keep(reshaped):
            (X @ X).view(-1)
            X @ X

    report = recorded(run)
    assert [(row.op, row.count) for row in report.views] == [
        ("aten.t.default", 2),
        ("aten.view.default", 2),
    ]
    assert {row.site.function for row in report.views} == {"reshaped"}


def test_what_a_handler_of_torchs_does_is_put_down_to_the_users_line():
    def run():
        wrapper = TwoTensor(torch.ones(2, 2), torch.ones(2, 2))
        with Keep(detached):
            wrapper.view(-1).add_(1)

    report = recorded(run)
    line = run.__code__.co_firstlineno + 3
    assert [(row.op, row.count, row.site.lineno) for row in report.views] == [
        ("aten.view.default", 2, line)
    ]
    assert {(row.op, row.site.lineno) for row in report.writes} == {("aten.add_.Tensor", line)}


def test_an_exchange_of_storage_is_no_write():
    assert recorded(lambda: torch.empty(0).set_(X)).writes == ()


def test_aliases_are_told_at_the_line_that_called_for_them():
    def run():
        with Keep(detached):
            torch.nn.functional.linear(X.view(2, 2, 4), X)

    [alias] = recorded(run).aliases
    assert alias.op == "aten._unsafe_view.default"
    assert (alias.site.function, alias.site.lineno) == ("run", run.__code__.co_firstlineno + 2)


def test_the_same_hazard_is_told_once_and_counted():
    [row] = recorded(lambda: [cached_and_spoilt() for _ in range(3)]).hazards
    assert row.count == 3


@pytest.mark.parametrize("record", ["site", "stack"])
def test_stacks_on_demand(record):
    [row] = recorded(cached_and_spoilt, record).hazards
    sites = [row.hazard.saved, row.hazard.used, row.hazard.writes[0].site]
    for site in sites:
        functions = [function for _, _, function in site.stack]
        assert functions[:1] == (["cached_and_spoilt"] if record == "stack" else [])


def test_without_a_record_there_are_counts_and_no_lines():
    report = recorded(cached_and_spoilt, "none")
    assert (report.record, report.hazards) == ("none", ())
    assert report.writes == (WriteRow("aten.mul_.Tensor", "self", UNKNOWN, 1),)
    assert [row.count for row in report.views] == [1]


def test_a_recorder_that_fails_to_enter_leaves_nothing(monkeypatch):
    recorder = Recorder()

    def fail():
        raise ZeroDivisionError

    monkeypatch.setattr(recorder._saved, "watch", fail)
    enter = torch.utils._python_dispatch.TorchDispatchMode.__enter__
    with pytest.raises(ZeroDivisionError):
        recorder.__enter__()
    assert torch.utils._python_dispatch.TorchDispatchMode.__enter__ is enter
    assert torch._C._len_torch_dispatch_stack() == 0


def test_it_can_be_entered_again():
    recorder = Recorder()
    for _ in range(2):
        with recorder:
            X.neg()
        X.neg()
    assert recorder.report("test").ops == (OpRow("aten.neg.default", 2),)


# ------------------------------------------------------------------------------ what it cannot see


def in_thread(run, name):
    thread = threading.Thread(target=run, name=name)
    thread.start()
    thread.join()


def test_threads_that_were_started_are_named():
    in_thread(X.neg, "before")
    report = recorded(lambda: [in_thread(X.neg, "one"), in_thread(X.neg, "two"), X.sum()])
    in_thread(X.neg, "after")
    assert report.threads == ("one", "two")
    assert [row.op for row in report.ops] == ["aten.sum.default"]


def test_a_thread_and_its_profiler_are_left_alone():
    def profile(frame, event, arg):
        events.append((threading.current_thread().name, event))

    def work():
        profilers.append(sys.getprofile())

    events, profilers = [], []
    recorded(lambda: in_thread(work, "plain"))
    threading.setprofile(profile)
    try:
        recorded(lambda: in_thread(work, "profiled"))
        assert threading.getprofile() is profile
    finally:
        threading.setprofile(None)
    assert profilers == [None, profile]
    assert ("profiled", "call") in events
    assert "plain" not in {name for name, _ in events}


def test_a_profiler_that_the_program_sets_stays():
    def profile(frame, event, arg):
        pass

    try:
        recorded(lambda: threading.setprofile(profile))
        assert threading.getprofile() is profile
    finally:
        threading.setprofile(None)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_forked_processes_are_counted():
    def fork():
        child = os.fork()
        if not child:
            os._exit(0)
        os.waitpid(child, 0)

    fork()
    assert recorded(lambda: None).processes == 0
    assert recorded(lambda: [fork(), fork()]).processes == 2


# ------------------------------------------------------------------------------ guarded


def backward_of_spoilt(hooks):
    w, x = torch.ones(4, requires_grad=True), torch.full((4,), 4.0)
    with hooks:
        y = w * x
    x.data.add_(1)
    y.sum().backward()
    return w.grad.tolist()


@pytest.mark.parametrize("record", ["none", "site", "stack"])
def test_what_autograd_saved_can_be_guarded(record):
    recorder = Recorder(record, guard_saved=True)
    with recorder, pytest.raises(MutatedTensorError) as caught:
        backward_of_spoilt(contextlib.nullcontext())
    [write] = caught.value.writes
    assert (write.op, write.function) == ("aten.add_.Tensor", "backward_of_spoilt")
    assert recorder.report("test").hazards == ()  # the guard's hooks are not the program's


def test_what_autograd_saved_is_not_guarded_unasked():
    with Recorder() as recorder:
        assert backward_of_spoilt(contextlib.nullcontext()) == [5.0] * 4
    assert recorder.report("test").hazards == ()


def test_hooks_of_the_program_are_guarded_and_reported():
    recorder = Recorder(guard_saved=True)
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach(), lambda t: t)
    with recorder, pytest.raises(MutatedTensorError):
        backward_of_spoilt(hooks)
    [row] = recorder.report("test").hazards
    assert row.hazard.keeper == "<lambda>"
