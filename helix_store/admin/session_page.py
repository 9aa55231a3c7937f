"""The page of one session: a summary, and one section at a time, each with its own address."""

from __future__ import annotations

from typing import Any, Final

from django.contrib import admin
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import URLPattern, path
from django.utils.safestring import SafeString
from django.utils.translation import gettext_lazy as _

from helix_store.admin.base import ReadOnlyAdmin
from helix_store.admin.elements import badge
from helix_store.admin.lookups import refuse_surrogates
from helix_store.admin.operating import OperatedAdmin
from helix_store.admin.sections import SECTIONS, Section, SessionView, state_file
from helix_store.admin.session_operations import SESSION_OPERATIONS
from helix_store.admin.session_summary import summary
from helix_store.admin.upkeep_operations import CLEAN_UP
from helix_store.exceptions import HelixStoreError
from helix_store.models import Session

__all__ = ["CHILDREN_OF", "SessionPage"]

CHILDREN_OF: Final = ("tenant", "parent_session_id")
"""The filter of the list for the sessions below one session."""


class SessionPage(OperatedAdmin, ReadOnlyAdmin):
    """The page of a session. ``?section=`` names the section; it works without JavaScript."""

    row_operations = SESSION_OPERATIONS
    table_operations = (CLEAN_UP,)
    page_template = "admin/helix_store/session/change_form.html"

    class Media:
        css = {"all": ["helix_store/admin.css", "helix_store/session.css"]}

    @admin.display(description=_("status"))
    def status_badge(self, session: Session) -> SafeString:
        return badge(session.status)

    def get_urls(self) -> list[URLPattern]:
        name = f"{self.opts.app_label}_{self.opts.model_name}_state"
        view = self.admin_site.admin_view(self.state_view)
        return [path("<path:object_id>/state.json", view, name=name), *super().get_urls()]

    def changeform_view(
        self,
        request: HttpRequest,
        object_id: str | None = None,
        form_url: str = "",
        extra_context: dict[str, Any] | None = None,
    ) -> HttpResponse:
        if object_id is None or request.method not in ("GET", "HEAD"):
            raise PermissionDenied
        found = self._view_of(request, object_id)
        return found if isinstance(found, HttpResponse) else self._page(found, extra_context or {})

    def state_view(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """The exact text of the custom state, as a file."""
        found = self._view_of(request, object_id)
        return found if isinstance(found, HttpResponse) else state_file(found)

    def state_url(self, session: Session) -> str:
        return self.view_url(Session, "state", session.pk)

    def _view_of(self, request: HttpRequest, object_id: str) -> SessionView | HttpResponse:
        """The session for this user, or a redirect to the list. Raises `PermissionDenied`."""
        refuse_surrogates(request)
        if not self.has_view_permission(request):
            raise PermissionDenied
        session = self.requested_row(request, object_id)
        if isinstance(session, HttpResponseRedirect):
            return session
        return SessionView(request=request, page=self, session=session)

    def _page(self, view: SessionView, extra: dict[str, Any]) -> HttpResponse:
        visible = [section for section in SECTIONS if section.is_visible(view)]
        chosen = self._chosen(view, visible)
        view.section = chosen.name
        shown = summary(view)
        context = {
            **self.admin_site.each_context(view.request),
            "title": shown["heading"],
            "opts": self.opts,
            "media": self.media,
            "original": view.session,
            "history_url": self.view_url(Session, "history", view.session.pk),
            "summary": shown,
            "tabs": [
                {"label": each.label, "url": view.url(each.name), "is_chosen": each is chosen}
                for each in visible
            ],
            "section_name": chosen.name,
            "section_label": chosen.label,
            "section_template": chosen.template,
            **_content(chosen, view),
            **extra,
        }
        view.request.current_app = self.admin_site.name
        return TemplateResponse(view.request, self.page_template, context)

    def _chosen(self, view: SessionView, visible: list[Section]) -> Section:
        """The section that the address names, else the first one that the user may view."""
        asked = view.text("section")
        if not asked:
            return visible[0]
        for section in SECTIONS:
            if section.name == asked:
                if section not in visible:
                    raise PermissionDenied
                return section
        raise Http404(_("There is no such section."))


def _content(section: Section, view: SessionView) -> dict[str, Any]:
    """What a section shows, or why it cannot be read: a damaged part does not hide the others."""
    try:
        return {"section": section.context(view), "section_problem": ""}
    except HelixStoreError as error:
        return {"section": {}, "section_problem": str(error)}
