"""Policies as files: ONNX and torch.export graphs that run without flatroll, proved on stored rows when written."""

from flatroll.deploy.export_policy import ExportedPolicy, export_policy
from flatroll.deploy.records import PolicyRecord, read_record

__all__ = ["ExportedPolicy", "PolicyRecord", "export_policy", "read_record"]
