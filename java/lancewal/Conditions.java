package lancewal;

import com.fasterxml.jackson.databind.node.ArrayNode;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.util.Base64;
import java.util.Set;
import org.apache.spark.sql.connector.expressions.Expression;
import org.apache.spark.sql.connector.expressions.Literal;
import org.apache.spark.sql.connector.expressions.NamedReference;
import org.apache.spark.sql.connector.expressions.filter.Predicate;

/** Predicates as JSON; lancewal decides which of them a table can evaluate exactly as Spark does. */
final class Conditions {
  private static final Set<String> LEAVES =
      Set.of(
          "=", "<=>", ">", ">=", "<", "<=", "IN", "IS_NULL", "IS_NOT_NULL", "STARTS_WITH", "ENDS_WITH",
          "CONTAINS");
  private static final Set<String> BRANCHES = Set.of("AND", "OR", "NOT");

  private Conditions() {}

  /** Null for a predicate that is more than columns compared with constants. */
  static ObjectNode of(Predicate predicate) {
    boolean branch = BRANCHES.contains(predicate.name());
    if (!branch && !LEAVES.contains(predicate.name())) {
      return null;
    }
    ObjectNode found = PythonCalls.JSON.createObjectNode();
    found.put("name", predicate.name());
    ArrayNode children = found.putArray("children");
    for (Expression child : predicate.children()) {
      ObjectNode operand = branch ? nested(child) : operand(child);
      if (operand == null) {
        return null;
      }
      children.add(operand);
    }
    return found;
  }

  private static ObjectNode nested(Expression child) {
    return child instanceof Predicate ? of((Predicate) child) : null;
  }

  private static ObjectNode operand(Expression child) {
    ObjectNode found = PythonCalls.JSON.createObjectNode();
    if (child instanceof NamedReference) {
      found.set("field", PythonCalls.JSON.valueToTree(((NamedReference) child).fieldNames()));
      return found;
    }
    if (!(child instanceof Literal)) {
      return null;
    }
    Literal<?> literal = (Literal<?>) child;
    found.put("type", literal.dataType().simpleString());
    if (literal.value() instanceof byte[]) {
      found.put("value", Base64.getEncoder().encodeToString((byte[]) literal.value()));
    } else if (literal.value() == null) {
      found.putNull("value");
    } else {
      found.put("value", literal.value().toString());
    }
    return found;
  }
}
