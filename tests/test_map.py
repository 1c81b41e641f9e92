"""The map from product files to tests: nearest tests, a reason for each, an error for other files."""

import pytest

from tests.map import PRODUCT, ROOT, files, main, related_tests

NEAREST = {
    "bridge/capture/twin.py": "tests/bridge/capture/test_twin.py",
    "bridge/capture/packed.py": "tests/bridge/capture/test_packed.py",
    "bridge/capture/loops/prove.py": "tests/bridge/capture/test_unrolled.py",
    "autodiff/zapp.py": "tests/autodiff/test_zapp.py",
    "bridge/api.py": "tests/bridge/dispatch/test_lifecycle.py",
}


@pytest.mark.parametrize("file", NEAREST)
def test_the_nearest_tests_come_first(file, capsys):
    found = related_tests(ROOT / file)
    kind = next(iter(found.values())).split()[0]
    assert found[ROOT / NEAREST[file]].startswith(kind)
    assert main([file]) == 0 and NEAREST[file] in capsys.readouterr().out


def test_every_product_file_has_tests():
    assert not [name for name, path in files().items() if name.split(".")[0] in PRODUCT and not related_tests(path)]


@pytest.mark.parametrize("file", ["tests/map.py", "bridge/no_such_file.py", "README.md"])
def test_what_is_no_product_file_is_told(file, capsys):
    with pytest.raises(SystemExit):
        main([file])
    assert f"{file}: no Python file below bridge" in capsys.readouterr().err
