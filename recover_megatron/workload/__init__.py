"""Who computes which microbatch of which samples. Pure: standard library only."""
