"""Settings of the Ray clusters that tests start."""

RAY_ENVIRONMENT = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Nodes of a busy machine take long to start.
    "RAY_raylet_start_wait_time_s": "240",
}
