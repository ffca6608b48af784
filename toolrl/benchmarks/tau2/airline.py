"""The tools of the airline domain. Their names and parameters are those of the data's gold actions.

As in tau2-bench they do not enforce the policy's rules (who may cancel what): that is the agent's task.
"""

from collections.abc import Sequence
from datetime import date as Date
from datetime import timedelta
from typing import Annotated, Literal

from pydantic import Field, with_config
from typing_extensions import TypedDict

from toolrl.benchmarks.tau2.common import ServiceTools, UserId
from toolrl.benchmarks.tau2.database import Record
from verl.envs.tools.base import ToolError

ReservationId = Annotated[str, Field(description="Id of a reservation, for example 'ZFA04Y'")]
Airport = Annotated[str, Field(description="Airport in three letters, for example 'JFK'")]
Day = Annotated[str, Field(description="Date as YYYY-MM-DD")]
FlightNumber = Annotated[str, Field(description="Number of a flight, for example 'HAT001'")]
PaymentId = Annotated[str, Field(description="Id of a payment method of the user, for example 'credit_card_0000000'")]
Cabin = Literal["basic_economy", "economy", "business"]


@with_config(extra="forbid")
class FlightChoice(TypedDict):
    flight_number: FlightNumber
    date: Day


@with_config(extra="forbid")
class Passenger(TypedDict):
    first_name: str
    last_name: str
    dob: Annotated[str, Field(description="Date of birth as YYYY-MM-DD")]


@with_config(extra="forbid")
class Payment(TypedDict):
    payment_id: PaymentId
    amount: Annotated[float, Field(description="Dollars")]


_NOW = "2024-05-15T15:00:00"  # the current time according to the data's policy
_NEW_RESERVATIONS = ("HATHAT", "HATHAU", "HATHAV")
_NEW_CERTIFICATES = ("certificate_3221322", "certificate_3221323", "certificate_3221324")
_INSURANCE, _BAGGAGE = 30, 50  # dollars per passenger; per paid bag
_CITIES = {
    "SFO": "San Francisco", "JFK": "New York", "LAX": "Los Angeles", "ORD": "Chicago", "DFW": "Dallas",
    "DEN": "Denver", "SEA": "Seattle", "ATL": "Atlanta", "MIA": "Miami", "BOS": "Boston", "PHX": "Phoenix",
    "IAH": "Houston", "LAS": "Las Vegas", "MCO": "Orlando", "EWR": "Newark", "CLT": "Charlotte",
    "MSP": "Minneapolis", "DTW": "Detroit", "PHL": "Philadelphia", "LGA": "New York LaGuardia",
}  # fmt: skip


class AirlineTools(ServiceTools):
    """Tools of an airline agent."""

    calculate = ServiceTools.calculate

    def get_user_details(self, user_id: UserId) -> Record:
        """Profile of a user: membership, payment methods, saved passengers, reservations."""
        return self._find("users", "User", user_id)

    def get_reservation_details(self, reservation_id: ReservationId) -> Record:
        """Flights, passengers, payments, baggage and insurance of a reservation."""
        return self._find("reservations", "Reservation", reservation_id)

    def get_flight_status(self, flight_number: FlightNumber, date: Day) -> str:
        """Status of a flight on one day."""
        return str(self._flight_day(flight_number, date)["status"])

    def list_all_airports(self) -> dict[str, str]:
        """Airports and their cities."""
        return _CITIES

    def search_direct_flight(self, origin: Airport, destination: Airport, date: Day) -> list[Record]:
        """Direct flights with seats to be booked on one day."""
        return self._bookable(date, origin=origin, destination=destination)

    def search_onestop_flight(self, origin: Airport, destination: Airport, date: Day) -> list[list[Record]]:
        """Pairs of flights with one stop between them; the second may leave on the next day."""
        trips = []
        for first in self._bookable(date, origin=origin):
            arrival, overnight, _ = first["scheduled_arrival_time_est"].partition("+1")
            day = (Date.fromisoformat(date) + timedelta(days=bool(overnight))).isoformat()
            for second in self._bookable(day, origin=first["destination"], destination=destination):
                if second["scheduled_departure_time_est"] >= arrival:
                    trips.append([first | {"date": date}, second | {"date": day}])
        return trips

    def book_reservation(
        self,
        user_id: UserId,
        origin: Airport,
        destination: Airport,
        flight_type: Literal["one_way", "round_trip"],
        cabin: Cabin,
        flights: list[FlightChoice],
        passengers: list[Passenger],
        payment_methods: list[Payment],
        total_baggages: int,
        nonfree_baggages: int,
        insurance: Literal["yes", "no"],
    ) -> Record:
        """Book a trip, once the user has confirmed it. The payments must add up to its price."""
        user = self._find("users", "User", user_id)
        legs = [self._leg(flight, cabin, len(passengers)) for flight in flights]
        price = len(passengers) * (sum(leg["price"] for leg in legs) + _INSURANCE * (insurance == "yes"))
        price += _BAGGAGE * nonfree_baggages
        _check_payments(user, payment_methods, price)
        reservation_id = next((id for id in _NEW_RESERVATIONS if id not in self._database["reservations"]), None)
        if reservation_id is None:
            raise ToolError("Too many reservations")

        user = self._database["users"].edit(user_id)
        for payment in payment_methods:
            _charge(user, payment)
        for flight in flights:
            day = self._database["flights"].edit(flight["flight_number"])["dates"][flight["date"]]
            day["available_seats"][cabin] -= len(passengers)
        reservation = {
            "reservation_id": reservation_id,
            "user_id": user_id,
            "origin": origin,
            "destination": destination,
            "flight_type": flight_type,
            "cabin": cabin,
            "flights": legs,
            "passengers": [dict(passenger) for passenger in passengers],
            "payment_history": [dict(payment) for payment in payment_methods],
            "created_at": _NOW,
            "total_baggages": total_baggages,
            "nonfree_baggages": nonfree_baggages,
            "insurance": insurance,
        }
        self._database["reservations"][reservation_id] = reservation
        user["reservations"].append(reservation_id)
        return reservation

    def cancel_reservation(self, reservation_id: ReservationId) -> Record:
        """Cancel all of a reservation and refund it, once the user has confirmed it."""
        reservation = self._reservation(reservation_id)
        paid = reservation["payment_history"]
        paid.extend([{"payment_id": entry["payment_id"], "amount": -entry["amount"]} for entry in paid])
        reservation["status"] = "cancelled"
        return reservation

    def update_reservation_flights(
        self,
        reservation_id: ReservationId,
        cabin: Cabin,
        flights: Annotated[list[FlightChoice], Field(description="All flights of the new trip, those that stay too")],
        payment_id: PaymentId,
    ) -> Record:
        """Change flights or the cabin, once the user has confirmed it. Flights that stay keep their price."""
        reservation = self._reservation(reservation_id)
        number = len(reservation["passengers"])
        kept = {
            (leg["flight_number"], leg["date"]): leg for leg in reservation["flights"] if cabin == reservation["cabin"]
        }
        legs = [
            kept.get((flight["flight_number"], flight["date"])) or self._leg(flight, cabin, number)
            for flight in flights
        ]
        before = sum(leg["price"] for leg in reservation["flights"])
        self._pay_for_change(reservation, payment_id, number * (sum(leg["price"] for leg in legs) - before))
        reservation.update(flights=legs, cabin=cabin)
        return reservation

    def update_reservation_baggages(
        self, reservation_id: ReservationId, total_baggages: int, nonfree_baggages: int, payment_id: PaymentId
    ) -> Record:
        """Set the number of bags, once the user has confirmed it. New ones that are not free are paid for."""
        reservation = self._reservation(reservation_id)
        price = _BAGGAGE * max(0, nonfree_baggages - reservation["nonfree_baggages"])
        self._pay_for_change(reservation, payment_id, price)
        reservation.update(total_baggages=total_baggages, nonfree_baggages=nonfree_baggages)
        return reservation

    def update_reservation_passengers(self, reservation_id: ReservationId, passengers: list[Passenger]) -> Record:
        """Change who travels, not how many, once the user has confirmed it."""
        if len(passengers) != len(self._find("reservations", "Reservation", reservation_id)["passengers"]):
            raise ToolError("The number of passengers does not match")
        reservation = self._reservation(reservation_id)
        reservation["passengers"] = [dict(passenger) for passenger in passengers]
        return reservation

    def send_certificate(self, user_id: UserId, amount: Annotated[float, Field(description="Dollars")]) -> str:
        """Give a user a travel certificate."""
        methods = self._find("users", "User", user_id)["payment_methods"]
        payment_id = next((id for id in _NEW_CERTIFICATES if id not in methods), None)
        if payment_id is None:
            raise ToolError("Too many certificates")
        certificate = {"source": "certificate", "id": payment_id, "amount": amount}
        self._database["users"].edit(user_id)["payment_methods"][payment_id] = certificate
        return f"Certificate {payment_id} of {amount} dollars was added to user {user_id}."

    transfer_to_human_agents = ServiceTools.transfer_to_human_agents

    def _reservation(self, reservation_id: str) -> Record:
        self._find("reservations", "Reservation", reservation_id)
        return self._database["reservations"].edit(reservation_id)

    def _flight_day(self, flight_number: str, date: str) -> Record:
        days: dict[str, Record] = self._find("flights", "Flight", flight_number)["dates"]
        if date not in days:
            raise ToolError(f"Flight {flight_number} not found on date {date}")
        return days[date]

    def _bookable(self, date: str, origin: str, destination: str | None = None) -> list[Record]:
        flights = []
        for flight in self._database["flights"].values():
            day = flight["dates"].get(date)
            matches = flight["origin"] == origin and destination in (None, flight["destination"])
            if matches and day is not None and day["status"] == "available":
                flights.append({key: value for key, value in (flight | day).items() if key != "dates"})
        return flights

    def _leg(self, flight: FlightChoice, cabin: str, passengers: int) -> Record:
        number = flight["flight_number"]
        day = self._flight_day(number, flight["date"])
        if day["status"] != "available":
            raise ToolError(f"Flight {number} not available on date {flight['date']}")
        if day["available_seats"][cabin] < passengers:
            raise ToolError(f"Not enough seats on flight {number}")
        known = self._database["flights"][number]
        place = {"origin": known["origin"], "destination": known["destination"]}
        return {**place, "flight_number": number, "date": flight["date"], "price": day["prices"][cabin]}

    def _pay_for_change(self, reservation: Record, payment_id: str, amount: float) -> None:
        """Charge or, where the amount is negative, refund a change; nothing is charged to a certificate."""
        user = self._database["users"].edit(reservation["user_id"])
        method = _payment_method(user, payment_id)
        if method["source"] == "certificate":
            raise ToolError("A certificate cannot be used to update a reservation")
        payment: Payment = {"payment_id": payment_id, "amount": amount}
        _check_payments(user, [payment], amount)
        _charge(user, payment)
        if amount:
            reservation["payment_history"].append(payment)


def _payment_method(user: Record, payment_id: str) -> Record:
    methods: dict[str, Record] = user["payment_methods"]
    if payment_id not in methods:
        raise ToolError(f"Payment method {payment_id} not found")
    return methods[payment_id]


def _check_payments(user: Record, payments: Sequence[Payment], price: float) -> None:
    for payment in payments:
        method = _payment_method(user, payment["payment_id"])
        if method["source"] != "credit_card" and method["amount"] < payment["amount"]:
            raise ToolError(f"Not enough balance in payment method {payment['payment_id']}")
    paid = sum(payment["amount"] for payment in payments)
    if paid != price:
        raise ToolError(f"The price is {price}, but the payments add up to {paid}")


def _charge(user: Record, payment: Payment) -> None:
    """Gift cards keep their remaining balance, certificates are used up."""
    methods = user["payment_methods"]
    source = methods[payment["payment_id"]]["source"] if payment["payment_id"] in methods else None
    if source == "gift_card":
        methods[payment["payment_id"]]["amount"] -= payment["amount"]
    elif source == "certificate":
        del methods[payment["payment_id"]]
