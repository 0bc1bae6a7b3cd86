"""Tests of the report through its page: what stands in it, where its links lead, and that it loads nothing."""

import sys
from html.parser import HTMLParser

import pytest
from conftest import predicted_sizes

from effgpu import units
from effgpu.__main__ import main
from effgpu.comparison import Comparison
from effgpu.course import report
from effgpu.course.outcomes import Outcome, Picture
from effgpu.measuring.device import Device
from effgpu.measuring.measurement import OUT_OF_MEMORY, Measurement
from effgpu.results import save

GPU = Device("NVIDIA H200", "cuda", 2**37, 16, versions={"torch": "2.8.0", "cuda": "12.8"})
CPU = Device("AMD EPYC <7B13>", "cpu", 2**34, 2, versions={"python": "3.13.1", "torch": "2.8.0"})


def compare(name: str, seconds: float = 0.5, peak: int = 400, device: Device = CPU, **fields) -> Comparison:
    """A comparison whose baseline takes a second and 1000 bytes."""
    rows = (
        Measurement("old", ((1.0, 1.0),) * 15, device, peak_allocated=1000),
        Measurement("new", ((seconds, seconds),) * 15, device, peak_allocated=peak),
    )
    return Comparison(name, rows, **fields)


class Page(HTMLParser):
    """A page: the attributes of its elements by tag, its tables as rows of texts, and all of its text."""

    def __init__(self, source: str):
        super().__init__()
        self.source, self.found, self.tables, self.text, self.in_cell = source, {}, [], "", False
        self.feed(source)

    def handle_starttag(self, tag, attrs):
        self.found.setdefault(tag, []).append(dict(attrs))
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("th", "td"):
            self.tables[-1][-1].append("")
            self.in_cell = True

    def handle_endtag(self, tag):
        self.in_cell = self.in_cell and tag not in ("th", "td")

    def handle_data(self, data):
        self.text += data
        if self.in_cell:
            self.tables[-1][-1][-1] += data


@pytest.fixture
def write(tmp_path):
    """A function that writes the report of a machine's lessons and reads it."""

    def write(*outcomes: Outcome, device: Device = CPU) -> Page:
        return Page(report.write(tmp_path / "report.html", [report.Section(device, outcomes)]).read_text())

    return write


def test_a_page_of_two_machines_is_one_file_that_loads_nothing_names_each_and_needs_no_lessons(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "nbformat", None)  # nor what reads lessons
    monkeypatch.setattr(report, "LESSONS", tmp_path / "nowhere")
    gpu, cpu = ([compare(name, device=device) for name in ("one", "two")] for device in (GPU, CPU))
    files = save(gpu, tmp_path / "gpu.json"), save(cpu, tmp_path / "cpu.json")
    assert main(["report", *map(str, files), "--out", str(tmp_path / "report.html")]) == 0
    page = Page((tmp_path / "report.html").read_text())
    assert len(page.found["img"]) == 4
    for image in page.found["img"]:
        assert image["src"].startswith("data:image/png;base64,iVBOR") and image["alt"].startswith("Plot of ")
    assert not {"script", "link", "iframe"} & page.found.keys()
    assert "url(" not in page.source and "@import" not in page.source
    anchors = [article["id"] for article in page.found["article"]]
    assert [link["href"] for link in page.found["a"]] == [f"#{anchor}" for anchor in anchors] and len(set(anchors)) == 4
    on_gpu, on_cpu = page.source.split("<section>")[1:]
    for text in ("AMD EPYC &lt;7B13&gt; (CPU, 2 cores)", "python 3.13.1, torch 2.8.0", "this CPU’s, not a GPU’s"):
        assert text in on_cpu and text not in on_gpu
    assert "NVIDIA H200" in on_gpu and "torch 2.8.0, cuda 12.8" in on_gpu
    for section, device in ((on_gpu, GPU), (on_cpu, CPU)):
        assert units.html_table(*compare("one", device=device).table()) in section, "the table that the lesson shows"


def test_the_page_begins_with_a_line_for_each_lesson(write):
    main = compare("10_slow", 1.5, full_size=predicted_sizes(20 * 2**30, 2**30))
    big = Outcome("10_slow", "Slow: but small", (compare("10_other"), main))
    same = Outcome("my_own", "my_own", (compare("my_own", 1.0, 1000),))
    page = write(Outcome("03_failed", "Failed", failure="cell [1]"), Outcome("02_silent", "Silent"), big, same)
    assert big.headline.full_size
    assert page.tables[0] == [
        ["lesson", "variant against baseline", "time", "peak memory", "at full size"],
        ["02 Silent", "nothing to compare on this machine", "", "", ""],
        ["03 Failed", "failed", "", "", ""],
        ["10 Slow", "new against old", "1.50 × slower [1.50, 1.50]", "−60 %", big.headline.full_size],
        ["my_own", "new against old", "same time (within 1 %)", "0 %", ""],
    ]


def test_a_lesson_has_its_title_its_claim_its_tables_and_its_plots(write):
    pictures = Picture("aGVsbG8=", "the first"), Picture("d29ybGQ=", "the second")
    comparisons = compare("10_other"), compare("10_slow", 1.5)
    page = write(Outcome("10_slow", "Slow: but small", comparisons, pictures, about="Wait."))
    words = [line for line in page.text.splitlines() if line]
    place = words.index("10 Slow: but small")
    assert words[place + 1 : place + 3] == ["Wait.", "10_other"] and "10_slow" in words
    assert [table[0] for table in page.tables[1:]] == [comparison.table()[0] for comparison in comparisons]
    assert page.tables[2][2][:3] == ["new", "1.50 s", "1.50 × slower [1.50, 1.50]"]
    images = [(image["src"], image["alt"]) for image in page.found["img"]]
    assert images == [(f"data:image/png;base64,{picture.png}", picture.alt) for picture in pictures]


def test_what_failed_is_named_and_nothing_that_a_lesson_says_is_markup(write):
    evil = "<i>\"'&amp;"
    device = Device(evil, "cuda", None, 2, versions={evil: evil})
    rows = Measurement(evil, ((1.0, 1.0),) * 15, device), Measurement(evil + "2", (), device, failed=OUT_OF_MEMORY)
    pictures = (Picture("aGVsbG8=", evil),)
    page = write(Outcome(evil, evil, (Comparison(evil, rows),), pictures, f"ValueError: {evil}", evil), device=device)
    assert "Lessons that failed" in page.text and f"{evil}: ValueError: {evil}" in page.text
    assert "i" not in page.found
    assert page.found["img"][0]["alt"] == page.found["div"][1]["aria-label"] == evil
    assert page.tables[0][1][:2] == [evil, f"{evil}2 against {evil}"]
    assert page.found["a"][0]["href"] == f"#{page.found['article'][0]['id']}" == f"#m0-{evil}"


def test_stored_results_are_gathered_by_lesson(monkeypatch):
    listed = [Outcome("02_dataloader", "DataLoader workers", about="Load ahead.")]
    monkeypatch.setattr(report, "read_lessons", lambda folder: listed)
    monkeypatch.setattr(report, "_draw", lambda comparison: Picture("", comparison.name))
    section = report.from_results([compare(name) for name in ("02_tokenise", "02_dataloader", "my_own", "other")])
    found = [(outcome.name, outcome.title, [c.name for c in outcome.comparisons]) for outcome in section.outcomes]
    lesson = ("02_dataloader", "DataLoader workers", ["02_tokenise", "02_dataloader"])
    assert found == [lesson, ("my_own", "my_own", ["my_own"]), ("other", "other", ["other"])]
    assert section.outcomes[0].about == "Load ahead."
    assert [picture.alt for picture in section.outcomes[0].pictures] == ["02_tokenise", "02_dataloader"]
