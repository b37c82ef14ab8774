package lancewal;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.util.Iterator;
import java.util.List;
import org.apache.spark.sql.catalyst.InternalRow;
import org.apache.spark.sql.catalyst.expressions.GenericInternalRow;
import org.apache.spark.sql.connector.catalog.procedures.BoundProcedure;
import org.apache.spark.sql.connector.catalog.procedures.ProcedureParameter;
import org.apache.spark.sql.connector.catalog.procedures.UnboundProcedure;
import org.apache.spark.sql.connector.read.LocalScan;
import org.apache.spark.sql.connector.read.Scan;
import org.apache.spark.sql.types.DataTypes;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.unsafe.types.UTF8String;

/** {@code CALL lance.compact('documents')} and the like; each gives one row, a report in JSON. */
final class Upkeep implements UnboundProcedure, BoundProcedure {
  static final List<String> NAMES = List.of("flush", "compact", "gc", "upkeep", "verify", "backup");
  private static final StructType REPORT = new StructType().add("report", DataTypes.StringType, false);

  private final LanceCatalog catalog;
  private final String name;

  Upkeep(LanceCatalog catalog, String name) {
    this.catalog = catalog;
    this.name = name;
  }

  @Override
  public String name() {
    return name;
  }

  @Override
  public String description() {
    return "lancewal " + name;
  }

  /** Unknown names are refused here: Spark does not show why a procedure could not be loaded. */
  @Override
  public BoundProcedure bind(StructType given) {
    if (!NAMES.contains(name)) {
      throw new IllegalArgumentException("there is no procedure " + name + "; there are " + NAMES);
    }
    return this;
  }

  @Override
  public boolean isDeterministic() {
    return false;
  }

  @Override
  public ProcedureParameter[] parameters() {
    ProcedureParameter table = ProcedureParameter.in("table", DataTypes.StringType).build();
    return switch (name) {
      case "gc" ->
          new ProcedureParameter[] {
            table,
            ProcedureParameter.in("min_age_hours", DataTypes.DoubleType).defaultValue("NULL").build(),
            ProcedureParameter.in("dry_run", DataTypes.BooleanType).defaultValue("false").build()
          };
      case "backup" ->
          new ProcedureParameter[] {table, ProcedureParameter.in("to", DataTypes.StringType).build()};
      default -> new ProcedureParameter[] {table};
    };
  }

  @Override
  public Iterator<Scan> call(InternalRow given) {
    ObjectNode arguments = PythonCalls.JSON.createObjectNode();
    arguments.put("procedure", name);
    ProcedureParameter[] parameters = parameters();
    for (int i = 0; i < parameters.length; i++) {
      if (given.isNullAt(i) && parameters[i].defaultValue() == null) {
        throw new IllegalArgumentException("the argument " + parameters[i].name() + " of " + name + " is null");
      }
    }
    for (int i = 1; i < parameters.length; i++) {
      if (!given.isNullAt(i)) {
        Object value = given.get(i, parameters[i].dataType());
        arguments.put(parameters[i].name(), value.toString());
      }
    }
    String table = given.getUTF8String(0).toString();
    JsonNode done = Refusals.shown(() -> PythonCalls.ask("call", catalog.options(table), arguments));
    UTF8String report = UTF8String.fromString(done.get("report").toString());
    Scan scan =
        new LocalScan() {
          @Override
          public StructType readSchema() {
            return REPORT;
          }

          @Override
          public InternalRow[] rows() {
            return new InternalRow[] {new GenericInternalRow(new Object[] {report})};
          }
        };
    return List.of(scan).iterator();
  }
}
