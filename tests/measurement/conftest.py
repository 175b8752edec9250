"""The marker of tests that need network namespaces."""


def pytest_configure(config):
    config.addinivalue_line(
        "markers",
        "links: limits real network links; needs root and iproute2, and is skipped elsewhere",
    )
