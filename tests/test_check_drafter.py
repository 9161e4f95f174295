"""`paceline check-drafter` finds the reading under which a drafter's drafts are accepted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline import check_drafter
from paceline.cli import main
from paceline.model.eagle import EagleModel
from tests import counting


@pytest.fixture
def prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The counting model has no tokenizer."""
    texts = [[(i + j) % counting.V for j in range(6)] for i in range(8)]
    monkeypatch.setattr(check_drafter, "_prompts", lambda _: texts)


def check(tmp_path: Path, **changes: Any) -> int:
    target = counting.write_target(tmp_path / "target")
    drafter = counting.write_drafter(tmp_path / "drafter", **changes)
    return main(["check-drafter", str(target), str(drafter), "--dtype", "float32"])


@pytest.mark.usefixtures("prompts")
def test_it_names_the_right_reading(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(tmp_path, norm_output=True) == 0
    out, err = capsys.readouterr()
    assert "reading 1 of 4" in err
    lines = {
        line.split("%")[-1].strip(): float(line.split()[0])
        for line in out.splitlines()
        if line.count("%") == 3
    }
    assert lines["layer ids output, norm_output head"] == 4.0
    assert 1.9 < lines["layer ids output, norm_output feedback"] < 2.2
    assert lines["layer ids boundary, norm_output head"] < 1.3
    assert (
        "The right reading: layer ids output, norm_output head (--speculative-draft-layer-ids "
        "output --speculative-draft-norm-output head)." in out
    )


@pytest.mark.usefixtures("prompts")
def test_a_file_without_questions_needs_no_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(tmp_path, paceline_boundaries=[2, 4, 6]) == 0
    out = capsys.readouterr().out
    assert "4.00   100%  100%  100%" in out and "no option is needed" in out


@pytest.mark.usefixtures("prompts")
def test_a_drafter_that_fits_under_no_reading_is_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(tmp_path, paceline_boundaries=[1, 4, 5]) == 1
    assert "Warning: hardly a draft is accepted" in capsys.readouterr().out


@pytest.mark.usefixtures("prompts")
def test_weights_that_are_no_numbers_are_said_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = counting.drafter_tensors()
    tensors["fc.weight"][0, 0] = float("nan")
    monkeypatch.setattr(counting, "drafter_tensors", lambda: tensors)
    assert check(tmp_path, paceline_boundaries=[2, 4, 6]) == 1
    err = capsys.readouterr().err
    assert "fc.weight holds infinities or what is no number" in err and "Traceback" not in err


@pytest.mark.usefixtures("prompts")
def test_a_drafter_that_only_fails_is_no_drafter_of_another_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fuse = EagleModel.fuse
    monkeypatch.setattr(EagleModel, "fuse", lambda *args: fuse(*args) * float("nan"))
    assert check(tmp_path, paceline_boundaries=[2, 4, 6]) == 1
    out, err = capsys.readouterr()
    assert "no drafts were made. The drafter fails" in out and "Traceback" not in err


def test_mistakes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = counting.write_target(tmp_path / "target")
    assert main(["check-drafter", str(target), str(tmp_path / "nothing")]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and str(tmp_path / "nothing") in err
    with pytest.raises(SystemExit):
        main(["check-drafter", str(target)])
    assert "DRAFTER" in capsys.readouterr().err
