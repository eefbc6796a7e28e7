"""The fold: schedule, execute, update. Knows neither torch nor Ray nor text."""
