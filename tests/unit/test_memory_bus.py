"""The in-memory bus behaves as every bus does."""

import pytest
from tests.integration.bus_behaviour import BusBehaviour

from trainmover.bus.memory import MemoryBus
from trainmover.bus.port import Bus


class TestMemoryBus(BusBehaviour):
    @pytest.fixture
    async def bus(self) -> Bus:
        return MemoryBus()
