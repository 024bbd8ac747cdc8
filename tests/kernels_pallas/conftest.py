import jaxtyping
import pytest


@pytest.fixture
def untyped():
    """Without the shape checks that only tests have: what users run into are the functions' own errors."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
