"""Moves by hand: for each an action of the list and a button of the page, with the same rule both ways."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from django.contrib import admin
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.utils import quote, unquote
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpResponseRedirect
from django.urls import path, reverse
from django.views.decorators.http import require_POST

from django_forgejobs.admin.moves import ByHand

if TYPE_CHECKING:
    from django.db.models import QuerySet
    from django.http import HttpRequest, HttpResponse
    from django.urls import URLPattern

    _ModelAdmin = admin.ModelAdmin[Any]
else:
    _ModelAdmin = admin.ModelAdmin


class OperatedAdmin(_ModelAdmin):
    """Rows that people move. ``actions`` are the names of ``moves`` that this entry offers."""

    moves: Mapping[str, ByHand] = {}
    actions: Any = ()

    def move(self, request: HttpRequest, words: ByHand, rows: Iterable[Any], asked: int) -> None:
        """Make the move with each of ``rows`` that can make it, and say how many of ``asked`` did."""
        raise NotImplementedError

    def has_operate_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Return whether the user may make moves by hand: Django's permission to change."""
        return super().has_change_permission(request, obj)

    def move_selected(self, request: HttpRequest, words: ByHand, queryset: QuerySet[Any]) -> None:
        """Make the move with what was on the page, not all that matches: a request cannot move a million."""
        selected = request.POST.getlist(ACTION_CHECKBOX_NAME)[: self.list_per_page]
        # A row that has left the list since is no longer in the queryset, and counts as refused.
        self.move(request, words, queryset.filter(pk__in=selected), len(selected))

    def get_urls(self) -> list[URLPattern]:
        """Add one address for each move by hand."""
        name = f"{self.opts.app_label}_{self.opts.model_name}"
        view = self.admin_site.admin_view(require_POST(self.move_view))
        moves = [
            path(f"<path:object_id>/{move}/", view, {"move": move}, name=f"{name}_{move}")
            for move in self.actions
        ]
        return [*moves, *super().get_urls()]

    def move_view(self, request: HttpRequest, object_id: str, move: str) -> HttpResponse:
        """Make one move with one row, and go back to its page, or to the list if it has left that."""
        if not self.has_operate_permission(request):
            raise PermissionDenied
        row = self.get_object(request, unquote(object_id))
        if row is None:
            raise Http404(f"There is no {self.opts.verbose_name} {object_id}.")
        self.move(request, self.moves[move], [row], 1)
        if self.get_object(request, str(row.pk)) is not None:
            return HttpResponseRedirect(self.address(request, "change", quote(row.pk)))
        return HttpResponseRedirect(self.address(request, "changelist"))

    def buttons(self, request: HttpRequest, row: Any) -> list[dict[str, Any]]:
        """Return the moves that the row can make now, for the template."""
        if not self.has_operate_permission(request):
            return []
        return [
            {
                "name": name,
                "label": words.label,
                "address": self.address(request, name, quote(row.pk)),
                "warning": words.warning if words.warns(row) else "",
            }
            for name, words in self.moves.items()
            if name in self.actions and words.offers(row)
        ]

    def address(self, request: HttpRequest | None, view: str, *args: Any) -> str:
        """Return the address of a view of this entry, which remembers the filters of the list."""
        name = f"admin:{self.opts.app_label}_{self.opts.model_name}_{view}"
        address: str = reverse(name, args=args, current_app=self.admin_site.name)
        if request is None:
            return address
        if view == "changelist":
            kept = request.GET.get("_changelist_filters")
        else:
            kept = self.get_preserved_filters(request)
        return f"{address}?{kept}" if kept else address
