"""Files that people name: errors say which, text is written whole, failures leave no folders."""

import errno
import os
from pathlib import Path

import pytest

from moefold.files import folder_for, path_in_errors, require_writable, write_text


def test_what_names_no_file_itself_is_named() -> None:
    with pytest.raises(OSError) as caught, path_in_errors("runs/a"), open("/dev/full", "w") as file:
        file.write("x")
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, "runs/a")
    with pytest.raises(FileNotFoundError) as missing, path_in_errors("runs/a"):
        open("not-there")  # noqa: SIM115
    assert missing.value.filename == "not-there"
    with (
        pytest.raises(ValueError, match=r"runs/a: is not UTF-8 text: .* in position 1"),
        path_in_errors("runs/a"),
    ):
        b"a\xff".decode()


def test_a_write_that_fails_leaves_the_file_before(tmp_path: Path, monkeypatch) -> None:
    file = tmp_path / "page.html"
    write_text(file, "before")
    with pytest.raises(UnicodeEncodeError):
        write_text(file, "text \udcff")

    def refused(self, *_: object, **__: object) -> int:
        self.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", refused)
    with pytest.raises(OSError) as caught:
        write_text(file, "after")
    assert caught.value.filename == str(file)
    assert (file.read_text(), os.listdir(tmp_path)) == ("before", ["page.html"])


def test_what_is_no_regular_file_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    full = tmp_path / "full"
    full.symlink_to("/dev/full")
    with pytest.raises(OSError) as caught:
        write_text(full, "text")
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(full))
    assert full.is_symlink()


def test_new_folders_that_hold_nothing_do_not_outlive_a_failure(tmp_path: Path) -> None:
    with pytest.raises(LookupError), folder_for(tmp_path / "a" / "b" / "c"):
        (tmp_path / "a" / "kept").touch()
        raise LookupError
    assert os.listdir(tmp_path / "a") == ["kept"]
    with pytest.raises(OSError), folder_for(tmp_path / "d" / ("e" * 300)):
        pass
    assert os.listdir(tmp_path) == ["a"]
    with folder_for(tmp_path / "f"):
        pass
    (tmp_path / "old").mkdir()
    with pytest.raises(LookupError), folder_for(tmp_path / "old"):
        raise LookupError
    assert sorted(os.listdir(tmp_path)) == ["a", "f", "old"]


def test_whether_a_place_can_be_written_is_seen_without_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, loop = tmp_path / "file", tmp_path / "loop"
    file.touch()
    loop.symlink_to(loop)
    require_writable(tmp_path / "a" / "b")
    for path, number in (
        (file / "x", errno.ENOTDIR),
        (loop / "x", errno.ELOOP),
        (tmp_path / ("n" * 300), errno.ENAMETOOLONG),
    ):
        with pytest.raises(OSError) as caught:
            require_writable(path)
        assert caught.value.errno == number
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(PermissionError):
        require_writable(tmp_path / "a")
    assert sorted(os.listdir(tmp_path)) == ["file", "loop"]
