import pytest
from rig import Engine, Manager


@pytest.fixture
def manager():
    manager = Manager().start()
    yield manager
    manager.stop()


@pytest.fixture
def engine(manager):
    return Engine(manager.socket)
