"""The form of a schedule. What a schedule must be is for ``schedules.check`` to say."""

from __future__ import annotations

import json
import re
from copy import copy
from datetime import datetime
from functools import cache
from typing import TYPE_CHECKING, Any
from zoneinfo import available_timezones

from django import forms
from django.core.exceptions import ValidationError
from django.utils import timezone
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from django_forgejobs import conf, payloads, registry, schedules
from django_forgejobs.admin import display
from django_forgejobs.exceptions import JobError
from django_forgejobs.models import Job, Schedule

if TYPE_CHECKING:
    _ModelForm = forms.ModelForm[Schedule]
else:
    _ModelForm = forms.ModelForm

#: The id of the list of zones on the page.
ZONES = "forgejobs-zones"


class Typed(str):
    """Text as somebody typed it, to tell it from a payload that is a text."""


class PayloadField(forms.CharField):
    """Any payload, as JSON. Not Django's field for JSON, which fails with what Python cannot read."""

    def to_python(self, value: Any) -> Any:
        """Return the payload; an empty text is ``{}``, and so is null, as in ``enqueue``."""
        if not value:
            return {}
        try:
            found = json.loads(value)
            payloads.dumps(found, max_bytes=conf.current().PAYLOAD_MAX_BYTES)
        except json.JSONDecodeError as error:
            raise ValidationError(gettext("This is no JSON: %(why)s.") % {"why": error}) from None
        except (ValueError, RecursionError):  # a number of 5,000 digits, 100,000 brackets
            raise ValidationError(gettext("This JSON cannot be read.")) from None
        except JobError as error:
            raise ValidationError(str(error)) from None
        return {} if found is None else found

    def run_validators(self, value: Any) -> None:
        """Leave the value alone: those of a text would not know what to do with it."""

    def validate(self, value: Any) -> None:
        """Accept what could be read."""

    def bound_data(self, data: Any, initial: Any) -> Any:
        """Return what was typed."""
        return Typed(data or "")

    def prepare_value(self, value: Any) -> Any:
        """Return the text to show."""
        return value if isinstance(value, Typed) else display.indented(value)

    def has_changed(self, initial: Any, data: Any) -> bool:
        """Return whether it is another payload, however it is written; 1, 1.0 and true are three."""
        try:
            now = self.to_python(data)
        except ValidationError:
            return True
        before, after = (json.dumps(one, sort_keys=True, default=repr) for one in (initial, now))
        return before != after


class MomentField(forms.SplitDateTimeField):
    """A time in the current zone. Of one that clocks show twice it is the first; one that they leave out is
    as long after the change as it seems to be.
    """

    def compress(self, data_list: Any) -> datetime | None:
        """Return the instant; Django would refuse these two."""
        try:
            return super().compress(data_list)
        except ValidationError as error:
            if error.code != "ambiguous_timezone":
                raise
            return timezone.make_aware(datetime.combine(*data_list))


class ScheduleForm(_ModelForm):
    """Edits a schedule of the admin's. With ``_preview`` in its data it is never valid: nothing is saved.

    A field is changed when it is sent with another value than it was shown with. What is not changed is as
    it is stored by now, whoever wrote it.
    """

    job_type = forms.ChoiceField(
        label=_("Job type"), help_text=_("The types that this site's jobs.py register.")
    )
    payload = PayloadField(
        label=_("Payload"),
        required=False,
        initial=dict,
        widget=forms.Textarea(attrs={"rows": 4, "cols": 60, "spellcheck": "false"}),
        help_text=_("JSON that each job is given."),
    )

    class Meta:
        model = Schedule
        fields = [
            "name",
            "job_type",
            "payload",
            "cron",
            "timezone",
            "enabled",
            "starts_at",
            "ends_at",
            "spread",
            "on_missed",
            "on_overlap",
            "queue",
            "priority",
            "max_attempts",
        ]
        help_texts = {
            "name": _("Unique. H in the expression, and the spread, come from it."),
            "cron": _(
                "Minute, hour, day of month, month, day of week: 30 2 * * * is 02:30 each day, "
                "*/15 8-18 * * mon-fri four times an hour at work. Or @hourly, @daily, @weekly, @monthly, "
                "@yearly."
            ),
            "timezone": _("A zone of the tz database, such as Europe/Berlin."),
            "enabled": _("A paused schedule that is enabled fires from its next future slot."),
            "starts_at": _("No slot before it."),
            "ends_at": _("No slot after it."),
            "spread": _(
                "Seconds, shorter than the time between two slots: each run starts so much later at the "
                "most, always the same for this schedule, so that not all start at once."
            ),
            "on_missed": _("For slots that came while no scheduler ran: when a later one is due too."),
            "on_overlap": _("While the previous run is still queued or running."),
            "queue": _("Empty: the job type's."),
            "priority": _("-100 to 100, larger is sooner. Empty: the job type's."),
            "max_attempts": _("Empty: the job type's."),
        }

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # A copy: the page goes on showing what is stored.
        super().__init__(*args, **kwargs | {"instance": copy(kwargs.get("instance"))})
        if "cron" not in self.fields:  # all is read-only
            return
        known = registry.types()
        choices = [(name, name) for name in known]
        stored = self.instance.job_type
        if stored and stored not in known:
            unknown = gettext("%(type)s (not registered here)") % {"type": stored}
            choices.insert(0, (stored, unknown))
        self.fields["job_type"].choices = [("", "---------"), *choices]  # type: ignore[attr-defined]
        self.fields["timezone"].widget.attrs |= {"list": ZONES, "autocomplete": "off", "spellcheck": "false"}
        self.fields["cron"].widget.attrs |= {"spellcheck": "false"}
        for name in ("starts_at", "ends_at"):
            self._name_parts(self.fields[name])
        # What was shown is sent along; by a program it need not be.
        shown = self.instance.pk and (not self.is_bound or self.add_initial_prefix("name") in self.data)
        for field in self.fields.values():
            field.show_hidden_initial = bool(shown)

    def _name_parts(self, field: Any) -> None:
        """Say in which zone a time is entered, and what its two inputs are: their labels are not theirs."""
        in_zone = gettext("In %(zone)s.") % {"zone": timezone.get_current_timezone_name()}
        field.help_text = f"{field.help_text} {in_zone}"
        for widget, part in zip(
            getattr(field.widget, "widgets", ()), (gettext("date"), gettext("time")), strict=False
        ):
            widget.attrs["aria-label"] = f"{field.label}, {part}"

    def is_valid(self) -> bool:
        """Return whether it may be saved."""
        return super().is_valid() and not self.previews

    @property
    def previews(self) -> bool:
        """Whether it was sent to see its runs."""
        return "_preview" in self.data

    @property
    def candidate(self) -> Schedule:
        """The schedule as it would be, as far as the fields are right."""
        stored = {one.attname: getattr(self.instance, one.attname) for one in Schedule._meta.concrete_fields}
        return Schedule(**stored | self.cleaned_data)

    def clean(self) -> dict[str, Any]:
        """Refuse what no scheduler could run, beside the field that is to blame."""
        cleaned: dict[str, Any] = super().clean() or self.cleaned_data
        if self.instance.pk:
            unchanged = cleaned.keys() - set(self.changed_data)
            cleaned |= {name: getattr(self.instance, name) for name in unchanged}
        if not self.errors and "cron" in self.fields:
            try:
                schedules.check(self.candidate)
            except JobError as error:
                text = schedules.reason(error, cleaned["name"])
                blamed = re.match(r"\w+", text)
                self.add_error(blamed[0] if blamed and blamed[0] in self.fields else None, text)
        return cleaned

    def validate_constraints(self) -> None:
        """Leave the table's constraints to the table: ``schedules.check`` has said it in better words."""

    def validate_unique(self) -> None:
        """Look for the name in the queue's database, wherever routers would look."""
        name = self.cleaned_data.get("name")
        others = (
            Schedule.objects.using(Job.objects.alias(None)).filter(name=name).exclude(pk=self.instance.pk)
        )
        if name and others.exists():
            self.add_error("name", gettext("There is a schedule of this name already."))


@cache
def zones() -> list[str]:
    """Return the names to choose from."""
    return sorted(available_timezones() - {"Factory", "localtime"})  # which are no places
