export function orderForm() { return ""; }
