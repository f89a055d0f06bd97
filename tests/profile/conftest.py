import pytest

from tests.profile import recordings


@pytest.fixture(scope="session")
def recorded(tmp_path_factory):
    """Returns a function that unpacks a stored recording once and returns its directory."""
    unpacked = {}

    def of(name):
        if name not in unpacked:
            unpacked[name] = recordings.unpack(name, tmp_path_factory.mktemp("recordings"))
        return unpacked[name]

    return of
