"""The report: self-contained, escaped, and honest about what is not finite."""

import json
import math
import re
from html.parser import HTMLParser

import pytest

from megatron_stability.errors import EXIT_FINDING, EXIT_FINE, UsageError
from megatron_stability.ledger.ledger import Ledger, RunInfo
from megatron_stability.records import Action, AttentionTable, Change, Decision, Episode, StepRecord, Tier, Verdict
from megatron_stability.report import charts, command, episode_chart, signal_chart, summary
from megatron_stability.report.runview import RunView

EVIL = '<script>alert("x")</script><img src=http://a.b/c>'
INFO = RunInfo(mode="act", versions={"torch": EVIL}, layout={"tensor_model_parallel_size": 2})


def write(ledger, step, action=Action.APPLY, *, advised=None, reason="clean", first=None, **fields):
    verdict = Verdict(detector="non_finite", tier=Tier.NON_FINITE, step=step, value=1.0, threshold=0.0, reason=reason)
    values = {"loss": 5.0 - step / 100, "grad_norm": 1.0, "learning_rate": 1e-3} | fields
    first = (step - 1) * 8 if first is None else first
    ledger.write(
        StepRecord(step=step, first_sample=first, samples=8, tokens=64.0, **values),
        Decision(
            step=step,
            action=action,
            advised=advised or action,
            reason=reason,
            verdicts=() if action is (advised or action) is Action.APPLY else (verdict,),
        ),
    )


@pytest.fixture
def folder(tmp_path):
    """30 steps; 10 skipped with NaN, 20 only advised, 31 halted, then a resume at 25."""
    with Ledger.open(tmp_path / "run", resume_step=0, resume_sample=0, run_info=INFO) as ledger:
        for step in range(1, 31):
            if step == 10:
                write(
                    ledger,
                    step,
                    Action.SKIP,
                    reason=EVIL,
                    loss=math.nan,
                    grad_norm=math.inf,
                    nonfinite_losses=1,
                    nonfinite_grads=1,
                    culprit_ranks=(3,),
                )
            else:
                write(ledger, step, advised=Action.SCALE_LR if step == 20 else None)
        write(ledger, 31, Action.HALT, reason="too many skips")
    with Ledger.open(tmp_path / "run", resume_step=25, resume_sample=200, run_info=INFO) as ledger:
        for step in range(26, 41):
            write(ledger, step)
    return tmp_path / "run"


def stock():
    steps = list(range(1, 41))
    loss = [5.0 if step < 15 else math.nan for step in steps]
    return RunView(name=EVIL, steps=steps, loss=loss, grad_norm=loss, learning_rate=[1e-3] * 40, notes=[EVIL])


class Page(HTMLParser):
    """Elements with their attributes, and the text outside of scripts and styles."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.text, self._inside = [], "", ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self._inside = tag

    def handle_endtag(self, tag):
        self._inside = ""

    def handle_data(self, data):
        if self._inside not in ("script", "style"):
            self.text += data


@pytest.fixture
def page(folder, tmp_path):
    path = command.build_report([stock(), RunView.from_ledger(folder, "plugin & co")], tmp_path / "out" / "report.html")
    return Page(path.read_text())


def test_the_page_loads_nothing_and_may_not(page):
    for tag, attributes in page.elements:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base", "form")
        for name in ("src", "href", "srcset", "action", "data"):
            assert name not in attributes, (tag, attributes)
    policies = [attributes["content"] for _, attributes in page.elements if "http-equiv" in attributes]
    assert len(policies) == 1
    assert policies[0].startswith("default-src 'none';")
    assert "http" not in policies[0]


def test_texts_are_escaped_everywhere(page, folder):
    assert page.text.count(EVIL) >= 4  # the name, the note, the version, the reason: as text, not as elements
    # plotly, one a figure, the page's own
    assert sum(tag == "script" for tag, _ in page.elements) == 4
    for run in (stock(), RunView.from_ledger(folder)):
        for figure in (charts.curves([run]), charts.samples([run])):
            if figure is not None:
                assert "<script" not in figure.to_json()
                assert "<img" not in figure.to_json()


def test_nan_is_shaded_and_labelled_in_every_panel_that_has_it():
    figure = charts.curves([stock()])
    assert [(shape.x0, shape.x1, shape.yref) for shape in figure.layout.shapes] == [
        (14.5, 40.5, "y domain"),
        (14.5, 40.5, "y2 domain"),
    ]
    labels = [note.text for note in figure.layout.annotations if "NaN" in note.text]
    assert labels == ["<b>✕ NaN</b> from step 15 on"] * 2


def test_of_many_short_stretches_each_is_shaded_and_none_labelled():
    loss = [math.nan if step % 20 == 0 else 1.0 for step in range(1000)]
    run = RunView(name="r", steps=range(1000), loss=loss, grad_norm=[1.0] * 1000, learning_rate=[0.0] * 1000)
    figure = charts.curves([run])
    assert [shape.x0 for shape in figure.layout.shapes] == [step - 0.5 for step in range(0, 1000, 20)]
    assert not [note for note in figure.layout.annotations if "NaN" in note.text]


def test_the_numbers_say_nan_and_name_the_ranks(page):
    assert "5 → NaN" in re.sub(r"\s+", " ", page.text)
    row = page.text[page.text.index("Incidents") :]
    assert "NaN" in row
    assert "Inf" in row
    assert "too many skips" in row
    assert "would scale lr" in row


def test_two_runs_share_axes_and_decisions_are_on_both_curves_and_the_timeline(folder):
    run = RunView.from_ledger(folder, "plugin")
    figure = charts.curves([stock(), run])
    lines = [trace for trace in figure.data if trace.mode == "lines"]
    assert [(trace.xaxis, trace.yaxis) for trace in lines] == [(f"x{n}", f"y{n}") for n in ("", "2", "3")] * 2
    skips = [trace for trace in figure.data if trace.name == "skip"]
    assert [(trace.yaxis, list(trace.x), list(trace.y)) for trace in skips] == [
        ("y", [10], [5.0 - 9 / 100]),  # its own loss is NaN: it stands at the last finite one
        ("y2", [10], [1.0]),
        ("y4", [10], ["plugin"]),
    ]
    assert [list(trace.x) for trace in figure.data if trace.name == "would scale lr"] == [[20]] * 3
    assert [list(trace.x) for trace in figure.data if trace.name == "halt"] == [[31]] * 3
    assert [list(trace.x) for trace in figure.data if trace.name == "resume"] == [[25.5]]


def test_the_sample_figure_holds_every_interval(folder):
    figure = charts.samples([RunView.from_ledger(folder, "r")])
    bars = {
        trace.name: [(first, first + length) for first, length in zip(trace.base, trace.x, strict=True)]
        for trace in figure.select_traces({"type": "bar"})
    }
    assert bars == {
        "trained": [(0, 72), (80, 200), (200, 320)],
        "skipped": [(72, 80)],
        "undone": [(200, 240)],
    }
    assert charts.samples([stock()]) is None


def test_a_run_without_ledger_says_that_it_has_none(page):
    assert "no ledger: fates not recorded" in page.text


def test_the_summary_counts_the_surviving_trajectory(folder):
    numbers = RunView.from_ledger(folder, "r").summary()
    assert numbers | {"first_loss": 0, "final_loss": 0, "lowest_loss": 0} == {
        "name": "r",
        "steps": 40,
        "first_loss": 0,
        "final_loss": 0,
        "lowest_loss": 0,
        "nonfinite_steps": 1,
        "skipped_steps": 1,
        "decisions": {"skip": 1, "halt": 1},
        "advised_only": {"scale_lr": 1},
        "episodes": [],
        "incidents": 3,
        "pages": [31],
        "samples": {"trained": 312, "skipped": 8, "undone": 40, "lost": 0, "repeated": 0},
        "findings": [],
    }
    assert (numbers["first_loss"], numbers["final_loss"]) == (4.99, 4.6)
    assert stock().summary()["final_loss"] == "nan"
    assert stock().summary()["samples"] is None


def test_a_skipped_last_step_is_not_the_final_loss(tmp_path):
    with Ledger.open(tmp_path, resume_step=0, resume_sample=0, run_info=INFO) as ledger:
        write(ledger, 1)
        write(ledger, 2, Action.SKIP, loss=math.nan, nonfinite_losses=1)
    assert RunView.from_ledger(tmp_path).summary()["final_loss"] == 4.99


def test_a_step_skipped_once_and_trained_after_a_rewind_counts_as_trained(tmp_path):
    with Ledger.open(tmp_path, resume_step=0, resume_sample=0, run_info=INFO) as ledger:
        write(ledger, 1, Action.SKIP)
        ledger.rewind(0, 0, "test")
        write(ledger, 1)
    run = RunView.from_ledger(tmp_path)
    assert run.withheld == frozenset()
    assert run.summary()["final_loss"] == 4.99


def test_thinning_keeps_extremes_and_gaps():
    values = [1.0] * 100_000
    values[12_345], values[77_777] = 50.0, -3.0
    values[50_000:50_010] = [math.nan] * 10
    points = list(charts.thin(range(100_000), values))
    assert len(points) < 2 * charts.POINTS
    assert [step for step, _ in points] == sorted(step for step, _ in points)
    assert (12_345, 50.0) in points
    assert (77_777, -3.0) in points
    assert [step for step, value in points if value is None] == [50_000]


def test_a_gradient_norm_of_zero_stays_visible_on_the_log_axis():
    run = RunView(name="r", steps=[1, 2, 3], loss=[1.0] * 3, grad_norm=[0.5, 0.0, 2.0], learning_rate=[0.0] * 3)
    (norm,) = [trace for trace in charts.curves([run]).data if trace.yaxis == "y2"]
    assert list(norm.y) == [0.5, 0.25, 2.0]
    assert list(norm.customdata) == ["0.5", "0", "2"]


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ([1.0, 2.0], []),
        ([math.inf, 1.0, math.nan], [(1, 1, "Inf"), (3, 3, "NaN")]),
        ([math.inf, math.nan, -math.inf], [(1, 3, "NaN")]),
        ([], []),
    ],
)
def test_stretches(values, found):
    assert charts.stretches(range(1, len(values) + 1), values) == found


def test_an_empty_run_and_a_ledger_without_steps_make_a_page(tmp_path):
    Ledger.open(tmp_path / "run", resume_step=0, resume_sample=0, run_info=INFO).close()
    page = Page(command.build_report([RunView.from_ledger(tmp_path / "run")], tmp_path / "r.html").read_text())
    assert "The ledger holds no step yet." in page.text


def test_the_command_prints_json_and_exits_with_a_finding_on_lost_samples(folder, tmp_path, capsys):
    out = tmp_path / "r.html"
    assert command.run([str(folder), str(folder), "--names", "a", "b", "--out", str(out), "--json"]) == EXIT_FINE
    document = json.loads(capsys.readouterr().out)
    assert [run["name"] for run in document["runs"]] == ["a", "b"]
    assert out.stat().st_size > 1e6
    (tmp_path / "gap").mkdir()
    with Ledger.open(tmp_path / "gap" / "stability", resume_step=0, resume_sample=0, run_info=INFO) as ledger:
        write(ledger, 1)
        write(ledger, 2, first=16)
    assert command.run([str(tmp_path / "gap"), "--out", str(out)]) == EXIT_FINDING
    assert "no fate for samples 8 to 15" in capsys.readouterr().out.replace("\n", " ")
    assert "lost: no fate for samples 8 to 15" in Page(out.read_text()).text


def test_bad_input_is_one_sentence(folder, tmp_path):
    with pytest.raises(UsageError, match="--names: 1 given for 2 run folders"):
        command.run([str(folder), str(folder), "--names", "a"])
    with pytest.raises(UsageError, match=r"ledger.jsonl: cannot be read"):
        command.run([str(tmp_path / "nowhere")])
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"--out .*file/r.html: cannot be written"):
        command.build_report([stock()], tmp_path / "file" / "r.html")
    kept = (folder / "ledger.jsonl").read_bytes()
    for out in (str(folder / "ledger.jsonl"), "", str(tmp_path)):
        with pytest.raises(UsageError, match=r"--out .*ends in \.html"):
            command.run([str(folder), "--out", out])
    assert (folder / "ledger.jsonl").read_bytes() == kept
    (tmp_path / "d.html").mkdir()
    with pytest.raises(UsageError, match="is a folder"):
        command.run([str(folder), "--out", str(tmp_path / "d.html")])
    with pytest.raises(ValueError, match="differ in length"):
        RunView(name="r", steps=[1], loss=[], grad_norm=[], learning_rate=[])


def test_a_failed_write_leaves_the_old_page_and_no_scrap(tmp_path, monkeypatch):
    out = tmp_path / "r.html"
    out.write_text("old")
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(UsageError, match="No space left"):
        command.build_report([stock()], out)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("r.html", "old")]


def test_numbers_for_people():
    assert [summary.number(v) for v in (None, 12345, 4.2131, math.nan, -math.inf, "nan")] == [
        "–",
        "12,345",
        "4.213",
        "NaN",
        "-Inf",
        "NaN",
    ]


def test_an_episode_stands_in_table_json_and_page(tmp_path, capsys) -> None:
    """What a detector found reaches a person, although nothing was done about it."""
    reason = f"largest attention logit 40199 is above 100 {EVIL}"
    fields = {"incident": 12, "detector": "attention_logits", "first_step": 12, "value": 40199.0, "threshold": 100.0}
    with Ledger.open(tmp_path / "run", resume_step=0, resume_sample=0, run_info=INFO) as ledger:
        for step in range(1, 31):
            write(ledger, step, signals={"attention/max_logit": 10.0 * step})
            if step in (12, 25):
                tier, change = (Tier.WATCH, Change.OPENED) if step == 12 else (Tier.LARGE, Change.WORSENED)
                episode = Episode(last_step=step, tier=tier, verdicts=step - 11, reason=reason, **fields)
                ledger.write_episode(change, episode)
    out = tmp_path / "page.html"
    assert command.run([str(tmp_path / "run"), "--out", str(out), "--json"]) == EXIT_FINE
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    (shown,) = run["episodes"]
    assert (shown["detector"], shown["tier"], shown["change"], shown["last_step"]) == (
        "attention_logits",
        "large",
        "worsened",
        25,
    )
    assert run["incidents"] == 1
    view = RunView.from_ledger(tmp_path / "run")
    assert "1 attention logits" in str([list(column.cells) for column in summary.table([view]).columns])
    figure = episode_chart.episodes([view])
    assert figure is not None
    bars = [trace for trace in figure.data if trace.type == "bar"]
    assert [(bar.name, list(bar.base), list(bar.x)) for bar in bars] == [("large", [11.5], [14])]
    (curve,) = [trace for trace in figure.data if trace.type == "scatter"]
    assert (curve.x[0], curve.y[0], curve.x[-1], curve.y[-1]) == (1, 10.0, 30, 300.0)
    assert "attention/max_logit, judged by attention_logits" in str(figure.layout.annotations)
    assert "<script>alert" not in out.read_text()


def test_two_detectors_that_open_in_one_step_are_two_episodes_of_one_incident(tmp_path) -> None:
    fields = {"incident": 3, "first_step": 3, "last_step": 3, "tier": Tier.WATCH, "value": 2.0, "threshold": 1.0}
    with Ledger.open(tmp_path / "run", resume_step=0, resume_sample=0, run_info=INFO) as ledger:
        write(ledger, 1)
        for detector in ("loss_spike", "loss_mad"):
            ledger.write_episode(Change.OPENED, Episode(detector=detector, verdicts=1, reason="high", **fields))
    shown = RunView.from_ledger(tmp_path / "run").summary()
    assert [episode["detector"] for episode in shown["episodes"]] == ["loss_spike", "loss_mad"]
    assert shown["incidents"] == 1


def _page(tmp_path, *runs):
    command.build_report([RunView.from_ledger(run) for run in runs], tmp_path / "page.html")
    return (tmp_path / "page.html").read_text()


def test_without_decisions_there_is_no_box_for_them_and_the_steps_are_labelled(tmp_path, folder):
    with Ledger.open(tmp_path / "calm", resume_step=0, resume_sample=0, run_info=INFO) as ledger:
        for step in range(1, 9):
            write(ledger, step)
    calm = charts.curves([RunView.from_ledger(tmp_path / "calm")])
    assert "Decisions" not in [note.text for note in calm.layout.annotations]
    assert (calm.layout.xaxis3.showticklabels, calm.layout.xaxis3.title.text) == (True, "step")
    both = charts.curves([RunView.from_ledger(tmp_path / "calm"), RunView.from_ledger(folder)])
    assert "Decisions" in [note.text for note in both.layout.annotations]


def test_a_sentence_stands_once_and_a_digest_is_short(tmp_path):
    digest = "0123456789abcdef" * 4
    info = RunInfo(mode="act", versions={"patches": digest}, layout={})
    with Ledger.open(tmp_path / "run", resume_step=0, resume_sample=0, run_info=info) as ledger:
        verdict = Verdict(
            detector="non_finite", tier=Tier.NON_FINITE, step=1, value=1.0, threshold=0.0, reason="THE-SENTENCE"
        )
        ledger.write(
            StepRecord(step=1, first_sample=0, samples=8, tokens=64.0, loss=math.nan, grad_norm=1.0),
            Decision(
                step=1, action=Action.SKIP, advised=Action.SKIP, reason="skipped: THE-SENTENCE", verdicts=(verdict,)
            ),
        )
    page = _page(tmp_path, tmp_path / "run")
    incidents = page[page.index("<h2>Incidents</h2>") :]
    assert incidents.count("THE-SENTENCE") == 1
    assert f">{digest}<" not in page
    assert ">0123456789ab…<" in page


def test_every_measured_family_has_a_row_and_a_zoom_is_linked(tmp_path):
    signals = {"log_z/weight": 4.0, "log_z/sum": 20.0, "log_z/square_sum": 100.0, "moe/dropped": 0.5, "clip_grad": 1.0}
    with Ledger.open(tmp_path / "run", resume_step=0, resume_sample=0, run_info=INFO) as ledger:
        for step in range(1, 4):
            write(ledger, step, signals=signals | {"held_out/web": float(step)} if step == 2 else signals)
        ledger.write_attention(_table(3, 7.0))
        ledger.write_episode(Change.OPENED, _gone())
        write(ledger, 4, signals=signals)
        ledger.write_attention(_table(4, 9.0))
    run = RunView.from_ledger(tmp_path / "run")
    figure = signal_chart.signals([run])
    assert {trace.name for trace in figure.data} == {
        *("log_z/mean", "log_z/mean_square", "moe/dropped", "clip_grad", "held_out/web")
    }
    (mean,) = [trace for trace in figure.data if trace.name == "log_z/mean"]
    assert list(mean.y) == [5.0] * 4
    assert len(figure.layout.shapes) == 1
    heat = signal_chart.layers([run]).data[0]
    assert (list(heat.x), [list(row) for row in heat.z]) == ([3, 4], [[7.0, 9.0], [6.0, 6.0]])
    page = _page(tmp_path, tmp_path / "run")
    assert "<h2>Signals</h2>" in page
    assert page.count('"meta":"steps"') == 4
    assert 'layout.meta === "steps"' in page


def test_a_map_of_many_tables_keeps_its_extremes(tmp_path, monkeypatch):
    monkeypatch.setattr(signal_chart, "COLUMNS", 10)
    with Ledger.open(tmp_path / "run", resume_step=0, resume_sample=0, run_info=INFO) as ledger:
        for step in range(1, 101):
            write(ledger, step)
            ledger.write_attention(_table(step, 1000.0 if step == 57 else 7.0))
    heat = signal_chart.layers([RunView.from_ledger(tmp_path / "run")]).data[0]
    assert len(heat.x) == 10
    assert max(heat.z[0]) == 1000.0


def _table(step, largest):
    grid = ((largest, 1.0), (6.0, 2.0))
    fields = {f"{name}_lh": grid for name in ("max_logit", "entropy", "factor", "clips", "growth")}
    return AttentionTable(step=step, layers=("decoder.layers.0", "decoder.layers.1"), max_gain_l=(1.0, 1.0), **fields)


def _gone():
    return Episode(
        incident=2,
        detector="loss_spike",
        first_step=2,
        last_step=3,
        tier=Tier.SMALL,
        value=9.0,
        threshold=3.0,
        verdicts=1,
        reason="so",
    )
