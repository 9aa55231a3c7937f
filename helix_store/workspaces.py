"""Workspace providers; the public path of `helix_store.cleanup.workspaces`."""

from helix_store.cleanup.workspaces import (
    StorageWorkspaceProvider,
    WorkspaceProvider,
    configured_workspace_providers,
)

__all__ = ["StorageWorkspaceProvider", "WorkspaceProvider", "configured_workspace_providers"]
