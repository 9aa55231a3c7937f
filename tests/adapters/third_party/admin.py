from django.contrib import admin

from helix_store.admin import SessionChildAdmin
from tests.adapters.third_party.models import Page


@admin.register(Page)
class PageAdmin(SessionChildAdmin):
    list_display = ("name", "of_session", "written_at")
