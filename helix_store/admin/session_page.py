"""The page of one session: a summary, and one section at a time, each with its own URL."""

from __future__ import annotations

from typing import Any, Final

from django import forms
from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import URLPattern, path
from django.utils.translation import gettext_lazy as _

from helix_store.actions import SESSION_ACTIONS
from helix_store.actions.action import Action
from helix_store.actions.answers import ANSWER
from helix_store.actions.upkeep import CLEAN_UP
from helix_store.admin.operating import OperatedAdmin
from helix_store.admin.sections import SECTIONS, Section, SessionView, state_file
from helix_store.admin.sections.waits import Waits
from helix_store.admin.session_summary import summary
from helix_store.exceptions import HelixStoreError
from helix_store.models import Session

CHILDREN_OF: Final = ("tenant", "parent_session_id")
"""The filter that limits the list to the sub-sessions of one session."""


class SessionPage(OperatedAdmin):
    """The page of a session. ``?section=`` selects the section; the page works without JavaScript."""

    row_operations = tuple(each for each in SESSION_ACTIONS if each.label)
    table_operations = (CLEAN_UP,)
    page_template = "admin/helix_store/session/change_form.html"

    class Media:
        css = {"all": ["helix_store/admin.css", "helix_store/session.css"]}

    def get_urls(self) -> list[URLPattern]:
        name = f"{self.opts.app_label}_{self.opts.model_name}_state"
        view = self.admin_site.admin_view(self.state_view)
        return [path("<path:object_id>/state.json", view, name=name), *super().get_urls()]

    def state_view(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """Return the exact text of the custom state, as a file."""
        session = self.readable_row(request, object_id)
        if isinstance(session, HttpResponseRedirect):
            return session
        return state_file(SessionView(request=request, page=self, session=session))

    def page_context(self, request: HttpRequest, row: Session, section: str = "") -> dict[str, Any]:
        view = SessionView(request=request, page=self, session=row, section=section)
        visible = [section for section in SECTIONS if section.is_visible(view)]
        chosen = self._chosen(view, visible)
        view.section = chosen.name
        shown = summary(view)
        return {
            "title": shown["heading"],
            "summary": shown,
            "tabs": [
                {"label": each.label, "url": view.url(each.name), "is_chosen": each is chosen}
                for each in visible
            ],
            "section_name": chosen.name,
            "section_label": chosen.label,
            "section_template": chosen.template,
            **_content(chosen, view),
        }

    def _confirmation(
        self, request: HttpRequest, operation: Action, row: Any, form: forms.Form
    ) -> HttpResponse:
        """Show an answer's form next to its call, where the input can be read, and not on a separate page.

        A changed input has its own page, which shows the difference.
        """
        if operation is not ANSWER or "edit" in form.fields:
            return super()._confirmation(request, operation, row, form)
        for field, problems in form.errors.items():
            for problem in problems:
                self.message_user(request, f"{form[field].label}: {problem}", messages.ERROR)
        return self.row_page(request, row, self.page_context(request, row, Waits.name))

    def _chosen(self, view: SessionView, visible: list[Section]) -> Section:
        """Return the section that the URL names, or the first one that the user may view."""
        asked = view.section or view.text("section")
        if not asked:
            return visible[0]
        for section in SECTIONS:
            if section.name == asked:
                if section not in visible:
                    raise PermissionDenied
                return section
        raise Http404(_("There is no such section."))


def _content(section: Section, view: SessionView) -> dict[str, Any]:
    """Return a section's context, or why it is unreadable, so a damaged section cannot hide the others."""
    try:
        return {"section": section.context(view), "section_problem": ""}
    except HelixStoreError as error:
        return {"section": {}, "section_problem": str(error)}
