"""The schedules in the admin: a list of when they run, a form with their next runs, and their slots."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar

from django.contrib import admin, messages
from django.contrib.admin.options import IncorrectLookupParameters
from django.contrib.admin.widgets import AdminSplitDateTime
from django.db import IntegrityError
from django.db.models import DateTimeField, Exists, OuterRef, Q, Subquery
from django.db.models.enums import TextChoices
from django.http import HttpResponseRedirect
from django.urls import NoReverseMatch, reverse
from django.utils import timezone
from django.utils.html import format_html
from django.utils.translation import gettext, ngettext
from django.utils.translation import gettext_lazy as _

from django_forgejobs import measures, schedules, slots
from django_forgejobs.admin import display
from django_forgejobs.admin.moves import OF_SCHEDULES, ByHand
from django_forgejobs.admin.operated import OperatedAdmin
from django_forgejobs.admin.preview import FORMAT, Preview, preview
from django_forgejobs.admin.schedule_form import ZONES, MomentField, ScheduleForm, zones
from django_forgejobs.exceptions import JobError
from django_forgejobs.models import ArchivedJob, Job, Schedule, ScheduleSlot
from django_forgejobs.slots import Fate, Source
from django_forgejobs.timetable import PAUSED, PLANNED_FOR, paused
from django_forgejobs.wallclock import zone

if TYPE_CHECKING:
    from datetime import datetime

    from django.db.models import QuerySet
    from django.http import HttpRequest, HttpResponse

#: Slots that a page shows, the newest.
SLOTS = 50

#: Seconds without a sign of life after which the list says that no scheduler runs.
SILENT = 60.0


class State(TextChoices):
    """What a schedule does now."""

    ACTIVE = "active", _("active")
    PAUSED = "paused", _("paused")
    DISABLED = "disabled", _("disabled")
    GONE = "gone", _("gone from the code")
    NEW = "new", _("planned at the next tick")
    ENDED = "ended", _("ended")


def state(schedule: Any) -> State:
    """Return the state to show."""
    if schedule.gone_at is not None:
        return State.GONE
    if not schedule.enabled:
        by_a_tick = schedule.disabled_reason and not schedule.disabled_reason.startswith(PAUSED)
        return State.DISABLED if by_a_tick else State.PAUSED
    if not schedule.planned:
        return State.NEW
    return State.ENDED if schedule.next_run_at is None else State.ACTIVE


_FIRES = Q(enabled=True, gone_at__isnull=True)
_STOPPED = Q(enabled=False, gone_at__isnull=True)
_BY_A_PERSON = Q(disabled_reason="") | Q(disabled_reason__startswith=PAUSED)


class StateFilter(admin.SimpleListFilter):
    """By the state that is shown."""

    title = _("state")
    parameter_name = "state"
    conditions: ClassVar[Any] = {
        State.ACTIVE.value: _FIRES & Q(planned=True, next_run_at__isnull=False),
        State.PAUSED.value: _STOPPED & _BY_A_PERSON,
        State.DISABLED.value: _STOPPED & ~_BY_A_PERSON,
        State.GONE.value: Q(gone_at__isnull=False),
        State.NEW.value: _FIRES & Q(planned=False),
        State.ENDED.value: _FIRES & Q(planned=True, next_run_at__isnull=True),
    }

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[Any, Any]]:
        """Return the states to choose from."""
        return list(State.choices)

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        """Return the schedules in the chosen state."""
        if self.value() not in (None, *self.conditions):
            raise IncorrectLookupParameters(f"state={self.value()!r}")
        return queryset.filter(self.conditions.get(self.value(), Q()))


@admin.register(Schedule)
class ScheduleAdmin(OperatedAdmin):
    """Schedules of the code are shown and can be paused; those of the admin are edited here."""

    form = ScheduleForm
    moves = OF_SCHEDULES
    actions: Any = ("run_now", "pause", "resume", "skip_next")
    list_display: Any = ("name", "state", "next_run", "last_run", "expression", "job_type")
    list_filter: ClassVar[Any] = (StateFilter, "source")
    list_per_page = 100
    search_fields = ("name", "job_type")
    ordering = ("name",)
    sortable_by = ("name", "job_type", "next_run")
    show_facets = admin.ShowFacets.NEVER
    change_list_template = "admin/forgejobs/schedules.html"
    change_form_template = "admin/forgejobs/schedule.html"
    formfield_overrides: ClassVar[Any] = {
        DateTimeField: {"form_class": MomentField, "widget": AdminSplitDateTime}
    }
    now_fields = ("state", "next_run", "last_run")
    fieldsets: ClassVar[Any] = (
        (None, {"fields": ("name", "job_type", "payload")}),
        (_("When"), {"fields": ("cron", "timezone", "enabled", "starts_at", "ends_at", "spread")}),
        (_("When it cannot run in time"), {"fields": ("on_missed", "on_overlap")}),
        (_("Its jobs"), {"fields": ("queue", "priority", "max_attempts")}),
    )

    class Media:
        css = {"all": ["django_forgejobs/admin.css"]}

    # --- moves by hand ---------------------------------------------------------------------------

    @admin.action(permissions=["operate"], description=OF_SCHEDULES["run_now"].of_selected)
    def run_now(self, request: HttpRequest, queryset: QuerySet[Any]) -> None:
        """Run the selected schedules now, beside their slots."""
        self.move_selected(request, OF_SCHEDULES["run_now"], queryset)

    @admin.action(permissions=["operate"], description=OF_SCHEDULES["pause"].of_selected)
    def pause(self, request: HttpRequest, queryset: QuerySet[Any]) -> None:
        """Pause the selected schedules."""
        self.move_selected(request, OF_SCHEDULES["pause"], queryset)

    @admin.action(permissions=["operate"], description=OF_SCHEDULES["resume"].of_selected)
    def resume(self, request: HttpRequest, queryset: QuerySet[Any]) -> None:
        """Resume the selected schedules."""
        self.move_selected(request, OF_SCHEDULES["resume"], queryset)

    @admin.action(permissions=["operate"], description=OF_SCHEDULES["skip_next"].of_selected)
    def skip_next(self, request: HttpRequest, queryset: QuerySet[Any]) -> None:
        """Leave out the next slot of the selected schedules."""
        self.move_selected(request, OF_SCHEDULES["skip_next"], queryset)

    def move(self, request: HttpRequest, words: ByHand, rows: Iterable[Any], asked: int) -> None:
        """Make the move with each schedule that can make it, and say how many did, and what came of it."""
        done = 0
        for schedule in rows:
            try:
                made = getattr(Schedule.objects, words.name)(schedule.pk, by=request.user.get_username())
            except JobError as error:
                text = f"{schedule}: {schedules.reason(error, schedule.name)}"
                self.message_user(request, text, messages.ERROR)
                asked -= 1
                continue
            if made:
                done += 1
                self.log_change(request, schedule, str(words.label))
                self._tell(request, schedule, made)
        for count, text, level in (
            (done, words.done, messages.SUCCESS),
            (asked - done, words.refused, messages.WARNING),
        ):
            if count:
                self.message_user(request, text % {"count": count}, level)

    def _tell(self, request: HttpRequest, schedule: Any, made: Any) -> None:
        """Say which job was enqueued, or which slot is left out."""
        if isinstance(made, Job):
            text = gettext("{schedule}: {job} was enqueued.")
            self.message_user(request, format_html(text, schedule=schedule.name, job=self._job(made.pk)))
        elif made is not True:
            text = gettext("{schedule}: the slot {slot} is left out.")
            slot = self._in_zone(schedule, made)
            self.message_user(request, format_html(text, schedule=schedule.name, slot=slot))

    # --- reading and writing ---------------------------------------------------------------------

    @property
    def alias(self) -> str:
        """The alias of the queue's database."""
        return Job.objects.alias(None)

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        """Return the schedules in the queue's database, each with the time that its clock shows."""
        newest = ScheduleSlot.objects.filter(
            schedule=OuterRef("pk"), fate__in=(Fate.FIRED, Fate.BY_HAND)
        ).order_by("-slot")
        rows: QuerySet[Any] = super().get_queryset(request).using(self.alias)
        return rows.clocked().annotate(  # type: ignore[attr-defined,no-any-return]
            last_run_slot=Subquery(newest.values("slot")[:1]),
            archived=Exists(ArchivedJob.objects.filter(pk=OuterRef("last_job_id"))),
        )

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Refuse what the code would bring back."""
        declared = obj is not None and obj.source == Source.CODE and obj.gone_at is None
        return not declared and super().has_delete_permission(request, obj)

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Refuse to edit what the code would set back."""
        of_code = obj is not None and obj.source == Source.CODE
        return not of_code and super().has_change_permission(request, obj)

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        """Return what is no field of the form."""
        return self.now_fields

    def get_fieldsets(self, request: HttpRequest, obj: Any = None) -> Any:
        """Return the form, below what the schedule does now."""
        if obj is None:
            return self.fieldsets
        first, *others = self.fieldsets
        if not self.has_change_permission(request, obj):  # Django could not show all that a row may hold
            first = (None, {"fields": ("name", "job_type", "given")})
        return ((_("Now"), {"fields": self.now_fields}), first, *others)

    def save_model(self, request: HttpRequest, obj: Any, form: Any, change: bool) -> None:
        """Write what was changed and nothing else: ticks have gone on while the form was open."""
        if not change:
            obj.source = Source.ADMIN
            obj.save(using=self.alias, force_insert=True)
            return
        changed = list(form.changed_data)
        if "enabled" in changed:
            obj.disabled_reason = "" if obj.enabled else paused(request.user.get_username())
            changed.append("disabled_reason")
        obj.save(using=self.alias, update_fields=changed)

    def get_deleted_objects(self, objs: Any, request: HttpRequest) -> Any:
        """Say how many slots go with them, rather than list them."""
        rows = list(objs)
        gone = ScheduleSlot.objects.using(self.alias).filter(schedule__in=rows).count()
        counts = {self.opts.verbose_name_plural: len(rows)}
        if gone:
            counts[ScheduleSlot._meta.verbose_name_plural] = gone
        words = gettext("%(schedule)s, which the code may declare: it would come back")
        refused = [one for one in rows if not self.has_delete_permission(request, one)]
        return [str(one) for one in rows], counts, {words % {"schedule": one} for one in refused}, []

    # --- the list --------------------------------------------------------------------------------

    def changeform_view(
        self, request: HttpRequest, object_id: Any = None, form_url: str = "", extra_context: Any = None
    ) -> Any:
        """Answer the second of two clicks, which finds the name taken only when it writes."""
        try:
            return super().changeform_view(request, object_id, form_url, extra_context)
        except IntegrityError:
            self.message_user(request, gettext("There is a schedule of this name already."), messages.ERROR)
            return HttpResponseRedirect(self.address(request, "changelist"))

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        """Add how long ago a scheduler was seen."""
        seen = measures.scheduler_seen_seconds(self.alias)
        silent = seen is None or seen > SILENT
        ago = None if seen is None else display.seconds_ago(seen)
        context = {"no_scheduler": silent, "scheduler_seen": ago, **(extra_context or {})}
        return super().changelist_view(request, context)

    @admin.display(description=_("state"))
    def state(self, schedule: Any) -> str:
        """Return the state, with the reason for it."""
        found = state(schedule)
        name = format_html('<span class="forgejobs-state forgejobs-{}">{}</span>', found, found.label)
        reason = schedules.reason(schedule.disabled_reason, schedule.name)
        if found is State.GONE:
            reason = display.distance(schedule.gone_at, schedule.now)
        return format_html("{} {}", name, display.line(reason, 300)) if reason else name

    @admin.display(description=_("runs"))
    def expression(self, schedule: Any) -> str:
        """Return the expression and its zone."""
        return format_html("<code>{}</code> {}", schedule.cron, schedule.timezone)

    @admin.display(description=_("last run"))
    def last_run(self, schedule: Any) -> str:
        """Return how long ago it ran, which leads to the job."""
        if schedule.last_run_slot is None:
            return display.NONE
        ago = display.moment(schedule.last_run_slot, display.distance(schedule.last_run_slot, schedule.now))
        return (
            ago if schedule.last_job_id is None else self._job(schedule.last_job_id, ago, schedule.archived)
        )

    @admin.display(description=_("next run"), ordering="next_run_at")
    def next_run(self, schedule: Any) -> str:
        """Return the next slot in the schedule's zone, and how far away it is."""
        slot = schedule.next_run_at
        if slot is None or state(schedule) is not State.ACTIVE:
            return display.NONE
        there, here = self._in_zone(schedule, slot), timezone.localtime(slot).strftime(FORMAT)
        yours = "" if here == there else gettext("yours: %(time)s") % {"time": here}
        return format_html(
            "<time datetime='{}'>{}</time> <span>{}</span> <span>{}</span>",
            slot.isoformat(),
            there,
            display.distance(slot, schedule.now),
            yours,
        )

    # --- the page --------------------------------------------------------------------------------

    @admin.display(description=_("payload"))
    def given(self, schedule: Any) -> str:
        """Return the payload, where it cannot be edited."""
        return format_html(
            '<pre class="forgejobs-text" tabindex="0">{}</pre>', display.pretty(schedule.payload)
        )

    def render_change_form(
        self,
        request: HttpRequest,
        context: Any,
        add: bool = False,
        change: bool = False,
        form_url: str = "",
        obj: Any = None,
    ) -> HttpResponse:
        """Add the next runs, the buttons and the slots."""
        form = context["adminform"].form
        shown = form.candidate if form.is_bound else obj
        if obj is not None:
            form.instance = obj  # what is read-only on the page is as it is stored
        context |= {
            "preview": None
            if shown is None or (obj is not None and obj.gone_at is not None)
            else self._preview(form, shown, obj),
            "previews": form.previews and not form.errors,
            "here": timezone.get_current_timezone_name(),
            "zones": zones(),
            "zones_id": ZONES,
            "buttons": [] if obj is None else self.buttons(request, obj),
            "is_gone": obj is not None and obj.gone_at is not None,
            "of_code": obj is not None and obj.source == Source.CODE,
            "edits": "cron" in form.fields,
            "ledger": [] if obj is None else list(self._ledger(obj)),
            "ledger_most": SLOTS,
        }
        return super().render_change_form(request, context, add, change, form_url, obj)

    def _preview(self, form: Any, shown: Schedule, stored: Any) -> Preview:
        """Return the next runs of what the form says, or why it has none."""
        if refused := [*form.errors.get("cron", ()), *form.errors.get("timezone", ())]:
            return Preview(error=" ".join(refused))
        since: datetime = timezone.now() if stored is None else stored.now
        as_planned = stored is not None and state(stored) is State.ACTIVE
        if as_planned and all(getattr(shown, name) == getattr(stored, name) for name in PLANNED_FOR):
            since = max(since, stored.next_run_at - slots.MOMENT)  # after what is left out
        return preview(shown, since, whole=not form.is_bound)

    def _ledger(self, schedule: Any) -> Iterable[dict[str, Any]]:
        """Yield the newest slots, as texts."""
        rows = ScheduleSlot.objects.using(self.alias).filter(schedule=schedule.pk).order_by("-slot")
        archived = Exists(ArchivedJob.objects.filter(pk=OuterRef("job_id")))
        for row in rows.annotate(archived=archived)[:SLOTS]:
            until = f" … {self._in_zone(schedule, row.until)}" if row.until else ""
            late = ""
            if row.late is not None and row.late >= 1:
                late = gettext("%(span)s late") % {"span": display.in_words(row.late)}
            yield {
                "fate": row.fate,
                "slot": f"{self._in_zone(schedule, row.slot)}{until}",
                "what": row.get_fate_display(),
                "count": self._many(row.count),
                "late": late,
                "reason": row.reason,
                "job": "" if row.job_id is None else self._job(row.job_id, archived=row.archived),
            }

    def _many(self, count: int) -> str:
        """Return how many slots a row stands for, if it is more than one."""
        words = ngettext("%(count)s slot", "%(count)s slots", count) % {"count": f"{count:,}"}
        return words if count > 1 else ""

    def _in_zone(self, schedule: Any, slot: datetime) -> str:
        """Return the slot in the schedule's zone, or in UTC where that zone is none."""
        try:
            return slot.astimezone(zone(schedule.timezone)).strftime(FORMAT)
        except JobError:
            return f"{slot:%Y-%m-%d %H:%M} UTC"

    def _job(self, pk: int, text: str = "", archived: bool = False) -> str:
        """Return a link to a job, which may be archived by now."""
        text = text or gettext("job %(id)s") % {"id": pk}
        view = f"admin:forgejobs_{'archivedjob' if archived else 'job'}_change"
        try:
            address = reverse(view, args=[pk], current_app=self.admin_site.name)
        except NoReverseMatch:  # a site without the jobs
            return text
        return format_html('<a href="{}">{}</a>', address, text)
