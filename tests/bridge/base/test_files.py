"""Source files of the user or of a library: packages beside torch's, or in Python's folder, are the user's."""

import os
import sysconfig

import pytest
import torch

from bridge.base.errors import is_pythons_file, is_user_file
from bridge.guards.machinery import is_library

TORCH = os.path.dirname(torch.__file__)
STDLIB = sysconfig.get_path("stdlib")


@pytest.mark.parametrize("of_torch", [os.path.join("nn", "functional.py"), "__init__.py"])
def test_torchs_own(of_torch):
    file = os.path.join(TORCH, of_torch)
    assert is_library(file) and not is_user_file(file) and not is_pythons_file(file)


@pytest.mark.parametrize("package", ["_geometric", "vision", "metrics", "-like"])
def test_packages_whose_names_begin_like_torchs_are_the_users(package):
    """``torch_geometric``: its reads are watched, and its lines are named."""
    file = os.path.join(TORCH + package, "nn", "models.py")
    assert is_user_file(file) and not is_library(file)


@pytest.mark.parametrize("folder", ["site-packages", "dist-packages"])
def test_packages_in_the_folder_of_pythons_library_are_the_users(folder):
    file = os.path.join(STDLIB, folder, "package", "model.py")
    assert is_user_file(file) and not is_library(file)
    assert is_library(os.path.join(STDLIB, "random.py")) and not is_user_file(os.path.join(STDLIB, "random.py"))
