"""Where records of nanoserve go inside Serve's processes."""

import logging


def join_serves_log() -> None:
    """Sends them to the log file of this replica, errors at once.

    Left alone they would come there as lines of standard error, of which Serve keeps up to a thousand in memory: the
    reason why a replica ended would end with it.
    """
    logger = logging.getLogger("nanoserve")
    logger.setLevel(logging.INFO)
    for handler in logging.getLogger("ray.serve").handlers:
        logger.addHandler(handler)
