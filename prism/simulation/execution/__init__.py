"""Where work is done: in threads of this process or on a Dask cluster, resumed after an end."""
