"""Readers of formats that few bring: Nsight Systems, Chakra, HTA's kernel tables, nccl-tests."""
